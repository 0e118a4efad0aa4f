"""MinHash signatures: k numbers per document, of which two documents share a part that is close to their Jaccard
similarity.

The similarity J of two documents is that of their sets of shingles: each n consecutive words (word_table.py says what a
word is), of a shorter document all its words. With k numbers the share of equal ones has the mean J and the standard
error sqrt(J (1 - J) / k) (Broder 1997), about 0.035 for J = 0.8 and k = 128.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.compiled.loading import DEDUPLICATION, address_of
from napkin.curation.deduplication.word_table import word_table
from napkin.errors import NapkinError

BATCH_BYTES = 2**23
MOST_HASHES = 4096

Signatures = NDArray[np.uint32]


@dataclass(frozen=True)
class MinHash:
    """How signatures are made; those of two documents can only be compared if this is the same."""

    hashes: int = 128
    words: int = 5
    """Of a shingle."""

    def __post_init__(self) -> None:
        if not 1 <= self.hashes <= MOST_HASHES:
            raise NapkinError(f"a signature of {self.hashes} hashes: use 1 to {MOST_HASHES}")
        if not 1 <= self.words <= 64:
            raise NapkinError(f"shingles of {self.words} words: use 1 to 64")

    def signatures(self, texts: Iterable[str]) -> tuple[Signatures, NDArray[np.int64]]:
        """The signatures of texts, of shape [texts, hashes], and the number of words of each.

        A text without words has a signature that says nothing: do not compare it.
        """
        found = list(self.batches(texts))
        if not found:
            return np.empty((0, self.hashes), np.uint32), np.empty(0, np.int64)
        return np.concatenate([each for each, _ in found]), np.concatenate([words for _, words in found])

    def batches(self, texts: Iterable[str]) -> Iterator[tuple[Signatures, NDArray[np.int64]]]:
        """`signatures`, some megabytes of text at a time."""
        parts: list[bytes] = []
        size = 0
        for text in texts:
            parts.append(text.encode("utf-8", "surrogatepass"))
            size += len(parts[-1])
            if size >= BATCH_BYTES:
                yield self._of_bytes(parts)
                parts, size = [], 0
        if parts:
            yield self._of_bytes(parts)

    def _of_bytes(self, parts: list[bytes]) -> tuple[Signatures, NDArray[np.int64]]:
        DEDUPLICATION.load("sketches")
        from napkin.curation.deduplication.compiled.sketches import sketch_documents

        text = np.frombuffer(b"".join(parts), np.uint8)
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        signatures = np.empty((len(parts), self.hashes), np.uint32)
        words = np.empty(len(parts), np.int64)
        # With 32 shingles per position, a position that is still empty is less likely than 1e-11 for 128 positions.
        room = 1 << (32 * self.hashes - 1).bit_length()
        ring, shingles, slots = (np.zeros(n, np.uint64) for n in (self.words, room, 2 * room))
        closed = np.empty(self.hashes, np.uint8)
        sketch_documents(
            *(address_of(text) if len(text) else 0, address_of(ends), len(parts), address_of(word_table())),
            *(self.hashes, self.words, address_of(signatures), address_of(words)),
            *(address_of(ring), address_of(shingles), address_of(slots), room, address_of(closed)),
        )
        return signatures, words


def estimated_similarity(first: Signatures, second: Signatures) -> NDArray[np.float64]:
    """The estimated Jaccard similarity of signatures, along the last axis."""
    return np.mean(first == second, axis=-1)
