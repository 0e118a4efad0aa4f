"""Deciding on duplicate documents: from the keys of all shards to the verdicts about each.

Of a cluster, a document of an earlier run (an index) stays before those of this one: it may have been published. Of the
rest it is the longest, of equally long ones that with the smallest identity, whatever the order of shards; or the first
that was read.

Documents are compared by their keys: one of the whole text, or one per band of a signature.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from napkin.curation.deduplication.equal_keys import join_equal_keys, refuse_little_memory
from napkin.curation.deduplication.key_file import CHUNK, KeyChunk, KeyFile, KeyHeader, open_key_files, opened_index
from napkin.curation.deduplication.minhash import BATCH_BYTES, Banding, MinHash, choose_banding
from napkin.curation.deduplication.verdicts import Clusters, Marks, Numbers, numbers_array, write_verdicts

Keep = Literal["longest", "first"]

_STEP = 2**16
# Of a cluster, in the dictionary that finds its best.
_CLUSTER_BYTES = 512


@dataclass
class KeptDocuments:
    """Maps each cluster of two documents or more, given by its root, to the number of the document that stays."""

    roots: Numbers
    kept: Numbers

    def dropped(self, first: int, members: Numbers) -> Iterator[tuple[int, int]]:
        """(document, the one that stays in its place) of documents from `first` on, whose roots are `members`."""
        if not len(self.roots):
            return
        at = np.minimum(np.searchsorted(self.roots, members), len(self.roots) - 1)
        kept = np.where(self.roots[at] == members, self.kept[at], np.arange(first, first + len(members)))
        for place in np.flatnonzero(kept != np.arange(first, first + len(members))).tolist():
            yield first + place, int(kept[place])


def choose_kept(
    files: Sequence[KeyFile], generations: Sequence[int], roots: Numbers, keep: Keep, scratch: Path, memory: int
) -> KeptDocuments:
    """Choose from each cluster.

    Args:
        files: whose documents are numbered one after another.
        generations: of each file; the documents of a smaller one stay before those of a larger.
        roots: of the cluster of each document.
        keep: the rule within a generation.
        scratch: a folder for what does not fit into memory.
        memory: bytes; where clusters need more, the files are read several times.
    """
    count = sum(len(each) for each in _roots_of_others(roots, Marks(len(roots), scratch / "counted", memory // 8)))
    many = numbers_array(count, scratch / "clusters", memory // 4)
    _fill_with_clusters(many, roots, Marks(len(roots), scratch / "filled", memory // 8))
    kept = numbers_array(len(many), scratch / "kept", memory // 4)
    at_a_time = max(memory // 4 // _CLUSTER_BYTES, 1)
    for first in range(0, len(many), at_a_time):
        chosen = many[first : first + at_a_time]
        best = _best_of(files, generations, roots, chosen, keep)
        kept[first : first + at_a_time] = [best[root][-1] for root in chosen.tolist()]
    return KeptDocuments(many, kept)


def _fill_with_clusters(many: Numbers, roots: Numbers, seen: Marks) -> None:
    """Fill in the roots of all clusters with another member, in ascending order."""
    filled = 0
    for found in _roots_of_others(roots, seen):
        many[filled : filled + len(found)] = found
        filled += len(found)
    many.sort()


def _roots_of_others(roots: Numbers, seen: Marks) -> Iterator[Numbers]:
    """The roots that some other number has, each once."""
    for start in range(0, len(roots), _STEP):
        piece = roots[start : start + _STEP]
        found = np.unique(piece[piece != np.arange(start, start + len(piece))])
        fresh = found[~seen.at(found)]
        seen.set(fresh)
        yield fresh


def _best_of(
    files: Sequence[KeyFile], generations: Sequence[int], roots: Numbers, chosen: Numbers, keep: Keep
) -> dict[int, tuple]:
    """Reduce the members of each chosen root to the smallest row; the number of the document comes last in a row."""
    best: dict[int, tuple] = {}
    number = 0
    for file, generation in zip(files, generations, strict=True):
        for chunk in range(len(file.starts) - 1):
            n = int(file.starts[chunk + 1] - file.starts[chunk])
            members = roots[number : number + n]
            at = np.minimum(np.searchsorted(chosen, members), len(chosen) - 1)
            places = np.flatnonzero(chosen[at] == members)
            lengths = file.values(chunk)[places].tolist() if keep == "longest" else [0] * len(places)
            names = file.identities(chunk, places.tolist()) if keep == "longest" else [""] * len(places)
            for place, root, length, name in zip(
                places.tolist(), members[places].tolist(), lengths, names, strict=True
            ):
                found = (generation, -length, name, number + place)
                if root not in best or found < best[root]:
                    best[root] = found
            number += n
    return best


def decide_on_documents(
    stage: str,
    summaries: Sequence[Path],
    decisions: Sequence[Path],
    scratch: Path,
    memory: int,
    *,
    keep: Keep,
    index: str,
) -> None:
    """Write for each shard which of its documents are dropped, each with the identity of the one that stays instead.

    Documents that share a key, directly or through others, are a cluster, of which one stays. `memory` is in bytes, in
    addition to what the process has before. `index` is the folder of a `KeyIndex`, or empty.
    """
    refuse_little_memory(memory // 2)
    with opened_index(index, summaries) as known:
        earlier = known.earlier() if known else []
        n_earlier = sum(map(len, earlier))
        paths = [path for generation in earlier for path in generation] + list(summaries)
        generations = [number for number, paths in enumerate([*earlier, summaries]) for _ in paths]
        files = open_key_files(paths)
        clusters = Clusters(sum(map(len, files)), scratch, memory // 4)
        join_equal_keys(files, clusters, scratch, memory // 2)
        roots = clusters.roots()
        kept = choose_kept(files, generations, roots, keep, scratch, memory * 3 // 4)
        starts = np.cumsum([0, *map(len, files)]).tolist()
        for number, decision in enumerate(decisions, n_earlier):
            verdicts = _verdicts_of(number, files, starts, roots, kept)
            write_verdicts(decision, stage, len(files[number]), verdicts)
        if known:
            known.extend()


def _verdicts_of(
    number: int, files: Sequence[KeyFile], starts: Sequence[int], roots: Numbers, kept: KeptDocuments
) -> Iterator[tuple[int, str]]:
    @lru_cache(maxsize=4096)
    def identity(document: int) -> str:
        place = bisect_right(starts, document) - 1
        return files[place].identity(document - starts[place])

    begin = starts[number]
    for first, last in pairwise(files[number].starts.tolist()):
        for document, other in kept.dropped(begin + first, roots[begin + first : begin + last]):
            yield document - begin, identity(other)


Identified = Iterable[tuple[str, str]]
"""Pairs of an identity and a text."""


@dataclass(frozen=True)
class ExactKeys:
    """One key of 128 bits (BLAKE2b) per text, of its words as they are: white space alone makes no difference."""

    @property
    def header(self) -> KeyHeader:
        return KeyHeader("BLAKE2b-128 of the text, white space as single spaces", tables=1, width=2)

    def chunks(self, documents: Identified) -> Iterator[KeyChunk]:
        for batch in _batches(documents):
            digests = b"".join(text_digest(text) for _, text in batch)
            keys = np.frombuffer(digests, "<u8").reshape(1, len(batch), 2)
            yield KeyChunk([identity for identity, _ in batch], _lengths(batch), keys)


@dataclass(frozen=True)
class NearKeys:
    """One key of 64 bits per band of a MinHash signature. A text without words has none."""

    minhash: MinHash
    banding: Banding

    @classmethod
    def of(cls, threshold: float, hashes: int = 128, words: int = 5) -> "NearKeys":
        """The keys that find nine in ten pairs of that Jaccard similarity, and more above it; see `choose_banding`."""
        return cls(MinHash(hashes, words), choose_banding(threshold, hashes))

    @property
    def header(self) -> KeyHeader:
        minhash, banding = self.minhash, self.banding
        definition = (
            f"MinHash of {minhash.words}-word shingles, {minhash.hashes} hashes, "
            f"{banding.bands} bands of {banding.rows} rows"
        )
        return KeyHeader(definition, tables=banding.bands, width=1)

    def chunks(self, documents: Identified) -> Iterator[KeyChunk]:
        for batch in _batches(documents):
            signatures, words = self.minhash.signatures(text for _, text in batch)
            keys = np.maximum(self.banding.keys(signatures), np.uint64(1))
            keys[:, words == 0] = 0
            yield KeyChunk([identity for identity, _ in batch], _lengths(batch), keys[:, :, None])


def text_digest(text: str) -> bytes:
    """16 bytes that two texts share if they are equal but for white space.

    >>> text_digest("a  b\\n") == text_digest("a b"), text_digest("a b") == text_digest("ab")
    (True, False)
    """
    return hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _batches(documents: Identified) -> Iterator[list[tuple[str, str]]]:
    """Some megabytes of documents at a time, at most a chunk."""
    batch: list[tuple[str, str]] = []
    size = 0
    for identity, text in documents:
        batch.append((identity, text))
        size += len(text)
        if size >= BATCH_BYTES or len(batch) == CHUNK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _lengths(batch: list[tuple[str, str]]) -> np.ndarray:
    return np.array([len(text) for _, text in batch], np.int64)
