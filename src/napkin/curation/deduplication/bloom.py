"""A Bloom filter (Bloom 1970): which of the texts of a stream were seen before, in memory that is fixed beforehand.

Each key sets k of m bits. A key whose bits are all set was seen before, or is one of few false positives; a key with an
unset bit was never seen. For n keys and a share p of false positives

    m = n · log2(1 / p) / ln 2 bits,    k = (m / n) · ln 2

1.44 · log2(1 / p) bits per key: 29 for one in a million, where an exact table takes 128 and more. The positions are
(a + i · b) mod m for the two halves a and b of a 128-bit digest, which does as well as k independent hashes (Kirsch and
Mitzenmacher 2006).
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.document_decisions import text_digest
from napkin.errors import NapkinError
from napkin.units import format_bytes

Keys = NDArray[np.uint64]
MOST_BYTES = 2**40


class BloomFilter:
    """A set of keys that answers "seen before" for every key that was added, and for a share of the others.

    >>> seen = BloomFilter(1000, false_positives=1e-6)
    >>> [seen.add_text(text) for text in ("a b", "c", "a  b")]
    [False, False, True]
    """

    def __init__(self, capacity: int, *, false_positives: float = 1e-6) -> None:
        """Bits for `capacity` different keys; after that many, a new key is taken for a seen one with the probability
        `false_positives`. Raises NapkinError for numbers outside of their limits, and for more than a terabyte."""
        if capacity < 1:
            raise NapkinError(f"a Bloom filter for {capacity} documents: use 1 or more")
        if not 1e-15 <= false_positives <= 0.5:
            raise NapkinError(f"{false_positives:g} false positives: use a share from 1e-15 to 0.5")
        self.bits = bits_of(capacity, false_positives)
        if self.bits > 8 * MOST_BYTES:
            raise NapkinError(
                f"a Bloom filter for {capacity:,} documents takes {format_bytes(self.bits // 8)}: use one of at most "
                f"{format_bytes(MOST_BYTES)}, by fewer documents or more false positives"
            )
        self.capacity = capacity
        self.hashes = max(1, round(self.bits / capacity * math.log(2)))
        self._bits = np.zeros((self.bits + 7) // 8, np.uint8)

    @property
    def bytes(self) -> int:
        """Bytes of its bits: all that it keeps."""
        return self._bits.nbytes

    def add_text(self, text: str) -> bool:
        """Add a text; True if it was seen before, but for white space, or is taken for one that was."""
        return bool(self.add(np.frombuffer(text_digest(text), "<u8").reshape(1, 2))[0])

    def add(self, keys: Keys) -> NDArray[np.bool_]:
        """Add keys of shape [n, 2], one after the other; True for those that were seen before."""
        n, modulus = len(keys), np.uint64(self.bits)
        first, step = keys[:, 0] % modulus, keys[:, 1] % modulus
        # A step of 0 would set one bit alone. Sums stay below 2^64: bits are at most 2^43.
        step = np.where(step == 0, np.uint64(1), step)
        places = (first[:, None] + np.arange(self.hashes, dtype=np.uint64) * step[:, None]) % modulus
        flat = places.ravel().astype(np.int64)
        was_set = (self._bits[flat >> 3] >> (flat & 7).astype(np.uint8)) & 1
        # Bits that an earlier key of the same call sets count as well: each bit is attributed to the first key that
        # sets it.
        _, setters, inverse = np.unique(flat, return_index=True, return_inverse=True)
        earlier = setters[inverse.ravel()] // self.hashes < np.repeat(np.arange(n), self.hashes)
        np.bitwise_or.at(self._bits, flat >> 3, np.uint8(1) << (flat & 7).astype(np.uint8))
        return np.all((was_set.astype(bool) | earlier).reshape(n, self.hashes), axis=1)

    @property
    def filled(self) -> float:
        """The share of bits that are set; to the power of `hashes` it is the probability of a false positive now."""
        return int(np.bitwise_count(self._bits).sum()) / self.bits


def bits_of(capacity: int, false_positives: float) -> int:
    return math.ceil(capacity * math.log2(1 / false_positives) / math.log(2))


def unseen(texts: Iterable[str], seen: BloomFilter) -> Iterator[str]:
    """The texts of a stream that were not seen before, in one pass.

    >>> list(unseen(["a b", "c", "a  b"], BloomFilter(1000)))
    ['a b', 'c']
    """
    return (text for text in texts if not seen.add_text(text))
