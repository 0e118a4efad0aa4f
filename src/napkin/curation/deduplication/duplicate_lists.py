"""Duplicates and near-duplicates among texts, without a pipeline."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from napkin.curation.deduplication.document_decisions import ExactKeys, NearKeys
from napkin.curation.deduplication.equal_keys import join_equal_keys
from napkin.curation.deduplication.key_file import KeyFile, write_keys
from napkin.curation.deduplication.verdicts import Clusters, lists_of

MEMORY = 2**30


def near_duplicates(
    texts: Iterable[str], threshold: float = 0.8, *, hashes: int = 128, words: int = 5, memory: int = MEMORY
) -> list[list[int]]:
    """The clusters of texts that are near-duplicates, each a list of positions in ascending order.

    Args:
        texts: an iterator will do; they are not kept.
        threshold: the Jaccard similarity of sets of shingles from which two texts should be found: at it with a
            probability of 0.9 at least, above it with a greater one; see minhash.py for the curve.
        hashes: numbers of a signature.
        words: of a shingle.
        memory: bytes for sorting; what does not fit goes to a temporary folder.

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
