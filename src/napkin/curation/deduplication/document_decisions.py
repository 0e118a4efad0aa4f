"""Deciding on duplicate documents: from the keys of all shards to the verdicts about each.

In a cluster, a document of an earlier run (an index) is kept in preference to those of this run: it may have been
published. Otherwise the longest is kept, among equally long ones that with the smallest identity, whatever the order of
shards; or the first that was read.

Documents are compared by their keys: one of the whole text, or one per band of a signature. `near_duplicates` and
`exact_duplicates` do so with texts, without a pipeline.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.equal_keys import (
    Clusters,
    Marks,
    Numbers,
    join_equal_keys,
    lists_of,
    numbers_array,
    refuse_little_memory,
)
from napkin.curation.deduplication.minhash import BATCH_BYTES, Banding, MinHash, choose_banding
from napkin.curation.deduplication.shard_files import (
    CHUNK,
    KeyChunk,
    KeyFile,
    KeyHeader,
    extended_index,
    open_key_files,
    write_keys,
    write_verdicts,
)

Keep = Literal["longest", "first"]

_STEP = 2**16
# Bytes per cluster in the dictionary that finds its best document.
_CLUSTER_BYTES = 512


def _choose_kept(
    files: Sequence[KeyFile], generations: Sequence[int], roots: Numbers, keep: Keep, scratch: Path, memory: int
) -> tuple[Numbers, Numbers]:
    """The roots of all clusters of two documents or more, in ascending order, and the document that stays of each.

    The files' documents are numbered one after another; `roots` has that of each one's cluster. Each file has a
    generation; documents of a smaller generation are kept in preference to those of a larger one, and `keep` is the
    rule within a generation. Where clusters need more than `memory` bytes, the files are read several times.
    """
    count = sum(len(each) for each in _roots_of_others(roots, Marks(len(roots), scratch / "counted", memory // 8)))
    many = numbers_array(count, scratch / "clusters", memory // 4)
    filled = 0
    for roots_found in _roots_of_others(roots, Marks(len(roots), scratch / "filled", memory // 8)):
        many[filled : filled + len(roots_found)] = roots_found
        filled += len(roots_found)
    many.sort()
    kept = numbers_array(len(many), scratch / "kept", memory // 4)
    at_a_time = max(memory // 4 // _CLUSTER_BYTES, 1)
    for first in range(0, len(many), at_a_time):
        chosen = many[first : first + at_a_time]
        best = _best_of(files, generations, roots, chosen, keep)
        kept[first : first + at_a_time] = [best[root][-1] for root in chosen.tolist()]
    return many, kept


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
                ranking = (generation, -length, name, number + place)
                if root not in best or ranking < best[root]:
                    best[root] = ranking
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
    addition to what the process has before. `index` is the folder of an index, or empty.
    """
    refuse_little_memory(memory // 2)
    with extended_index(index, summaries) as earlier:
        generations = [number for number, paths in enumerate([*earlier, summaries]) for _ in paths]
        files = open_key_files([path for paths in [*earlier, summaries] for path in paths])
        clusters = Clusters(sum(map(len, files)), scratch, memory // 4)
        join_equal_keys(files, clusters, scratch, memory // 2)
        roots = clusters.roots()
        kept = _choose_kept(files, generations, roots, keep, scratch, memory * 3 // 4)
        starts = np.cumsum([0, *map(len, files)]).tolist()
        for number, decision in enumerate(decisions, len(files) - len(decisions)):
            verdicts = _verdicts_of(number, files, starts, roots, kept)
            write_verdicts(decision, stage, len(files[number]), verdicts)


def _verdicts_of(
    number: int, files: Sequence[KeyFile], starts: Sequence[int], roots: Numbers, kept: tuple[Numbers, Numbers]
) -> Iterator[tuple[int, str]]:
    """(document, identity of the one that stays instead) of the documents of a file that are dropped."""

    @lru_cache(maxsize=4096)
    def identity(document: int) -> str:
        place = bisect_right(starts, document) - 1
        return files[place].identity(document - starts[place])

    clusters, stays = kept
    if not len(clusters):
        return
    begin = starts[number]
    for first, last in pairwise(files[number].starts.tolist()):
        documents, members = np.arange(begin + first, begin + last), roots[begin + first : begin + last]
        at = np.minimum(np.searchsorted(clusters, members), len(clusters) - 1)
        others = np.where(clusters[at] == members, stays[at], documents)
        for place in np.flatnonzero(others != documents).tolist():
            yield first + place, identity(int(others[place]))


Identified = Iterable[tuple[str, str]]
"""Pairs of an identity and a text."""


class ExactKeys:
    """One key of 128 bits (BLAKE2b) per text, made of its unchanged words: only white space makes no difference."""

    header = KeyHeader("BLAKE2b-128 of the text, white space as single spaces", tables=1, width=2)

    def chunks(self, documents: Identified) -> Iterator[KeyChunk]:
        for identities, texts, lengths in _batches(documents):
            digests = b"".join(map(text_digest, texts))
            yield KeyChunk(identities, lengths, np.frombuffer(digests, "<u8").reshape(1, len(texts), 2))


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
        for identities, texts, lengths in _batches(documents):
            signatures, words = self.minhash.signatures(texts)
            keys = np.maximum(self.banding.keys(signatures), np.uint64(1))
            keys[:, words == 0] = 0
            yield KeyChunk(identities, lengths, keys[:, :, None])


def text_digest(text: str) -> bytes:
    """16 bytes that two texts share if they are equal but for white space.

    >>> text_digest("a  b\\n") == text_digest("a b"), text_digest("a b") == text_digest("ab")
    (True, False)
    """
    return hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _batches(documents: Identified) -> Iterator[tuple[list[str], list[str], NDArray[np.int64]]]:
    """Identities, texts and lengths of some megabytes of documents at a time, at most a chunk."""
    identities: list[str] = []
    texts: list[str] = []
    size = 0
    for identity, text in documents:
        identities.append(identity)
        texts.append(text)
        size += len(text)
        if size >= BATCH_BYTES or len(texts) == CHUNK:
            yield identities, texts, np.array([*map(len, texts)], np.int64)
            identities, texts, size = [], [], 0
    if texts:
        yield identities, texts, np.array([*map(len, texts)], np.int64)


MEMORY = 2**30


def near_duplicates(
    texts: Iterable[str], threshold: float = 0.8, *, hashes: int = 128, words: int = 5, memory: int = MEMORY
) -> list[list[int]]:
    """The clusters of texts that are near-duplicates, each a list of positions in ascending order.

    Two texts are found at the Jaccard similarity `threshold` of their sets of shingles of so many `words` with a
    probability of 0.9 at least, above it with a greater one; minhash.py has the curve. `hashes` is the size of a
    signature. Texts are not kept; keys that do not fit into `memory` bytes go to a temporary folder.

    >>> near_duplicates(["One two three four five six.", "seven", "one  two three, four five SIX"])
    [[0, 2]]
    """
    return _clusters(texts, NearKeys.of(threshold, hashes, words), memory)


def exact_duplicates(texts: Iterable[str], *, memory: int = MEMORY) -> list[list[int]]:
    """The clusters of texts that are equal but for white space, each a list of positions in ascending order.

    >>> exact_duplicates(["a b", "c", "a  b "])
    [[0, 2]]
    """
    return _clusters(texts, ExactKeys(), memory)


def _clusters(texts: Iterable[str], keys: NearKeys | ExactKeys, memory: int) -> list[list[int]]:
    with TemporaryDirectory(prefix="napkin-") as folder:
        scratch = Path(folder)
        numbered = ((str(number), text) for number, text in enumerate(texts))
        write_keys(scratch / "keys", keys.header, keys.chunks(numbered))
        file = KeyFile(scratch / "keys")
        clusters = Clusters(len(file), scratch, memory // 4)
        join_equal_keys([file], clusters, scratch, memory // 2)
        return lists_of(clusters.roots())
