"""MinHash: k numbers per document, of which two documents share a part that is close to their Jaccard similarity.

A document is the set S of its shingles: each n consecutive words, of a shorter document all its words. With random a
and b and a prime p above all hashes, (a · h + b) mod p puts the shingles' hashes h in an order, and the first shingle
of the union of two sets is as likely one of both as their Jaccard similarity J says. So k such orders give

    signature(S)[i] = min over h in S of (a_i · h + b_i) mod p
    similarity(S, T) = mean(signature(S) == signature(T))

with the mean J and the standard error sqrt(J (1 - J) / k), about 0.035 for J = 0.8 and k = 128 (Broder 1997). That is
`plain_signature`, k passes over the shingles. `MinHash` has the compiled form (compiled/sketches.py): one pass over the
text, in which each shingle is hashed once, for the same mean and error.

A word is a run of letters, digits and combining marks, without regard to case (for Latin, Greek, Cyrillic and
Armenian letters). Characters of scripts that are written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese)
are words of their own. Everything else separates words: punctuation, symbols and white space do not count.

Signatures are compared by bands (locality-sensitive hashing). Of b bands of r numbers each, two documents of similarity
s share at least one with probability 1 - (1 - s^r)^b, an S-shaped curve (Indyk and Motwani 1998; Leskovec, Rajaraman
and Ullman, Mining of Massive Datasets, 3.4).
"""

import random
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.compiled import DEDUPLICATION, address_of
from napkin.errors import NapkinError
from napkin.tokenizer.numba.character_classes import KIND, LETTER, MARK, NUMBER, character_classes

PRIME = 2**61 - 1


def plain_signature(shingles: Set[int], hashes: int, seed: int = 0) -> list[int]:
    """The signature of a set of hashes by the formula; a test holds the compiled form to it.

    >>> hashes = random.Random(1).sample(range(PRIME), 5)
    >>> first, second = (np.array(plain_signature(set(part), 1000)) for part in (hashes[:4], hashes[1:]))
    >>> round(float(np.mean(first == second)), 1)   # they share 3 of 5
    0.6
    """
    draw = random.Random(seed)
    factors = [(draw.randrange(1, PRIME), draw.randrange(PRIME)) for _ in range(hashes)]
    return [min((a * shingle + b) % PRIME for shingle in shingles) for a, b in factors]


BATCH_BYTES = 2**23
MOST_HASHES = 4096

Signatures = NDArray[np.uint32]


@dataclass(frozen=True)
class MinHash:
    """Makes signatures; those of two documents can only be compared if hashes and words are the same."""

    hashes: int = 128
    words: int = 5
    """Words per shingle."""

    def __post_init__(self) -> None:
        if not 1 <= self.hashes <= MOST_HASHES:
            raise NapkinError(f"a signature of {self.hashes} hashes: use 1 to {MOST_HASHES}")
        if not 1 <= self.words <= 64:
            raise NapkinError(f"shingles of {self.words} words: use 1 to 64")

    def signatures(self, texts: Iterable[str]) -> tuple[Signatures, NDArray[np.int64]]:
        """The signatures of texts, of shape [texts, hashes], and the number of words of each.

        A text without words has a signature that says nothing: do not compare it.
        """
        signatures = [(np.empty((0, self.hashes), np.uint32), np.empty(0, np.int64))]
        parts: list[bytes] = []
        size = 0
        for text in texts:
            parts.append(text.encode("utf-8", "surrogatepass"))
            size += len(parts[-1])
            if size >= BATCH_BYTES:
                signatures.append(self._of_bytes(parts))
                parts, size = [], 0
        if parts:
            signatures.append(self._of_bytes(parts))
        return np.concatenate([each for each, _ in signatures]), np.concatenate([words for _, words in signatures])

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


def estimated_similarity(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.float64]:
    """The estimated Jaccard similarity of signatures of either form, along the last axis."""
    return np.mean(first == second, axis=-1)


LEAST_FOUND = 0.9
"""The least share of the pairs at the threshold itself that bands find."""
_POINTS = 2000


@dataclass(frozen=True)
class Banding:
    """b bands of r rows."""

    bands: int
    rows: int

    def probability(self, similarity: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """The probability that two documents of this similarity share a band."""
        return 1 - (1 - similarity**self.rows) ** self.bands

    def keys(self, signatures: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """A hash per band and document, of shape [bands, documents]; two documents share a band if theirs are equal."""
        DEDUPLICATION.load("sketches")
        from napkin.curation.deduplication.compiled.sketches import band_keys

        signatures = np.ascontiguousarray(signatures)
        count, hashes = signatures.shape
        keys = np.empty((self.bands, count), np.uint64)
        band_keys(address_of(signatures), count, hashes, self.bands, self.rows, address_of(keys))
        return keys


def choose_banding(
    threshold: float, hashes: int, *, least_found: float = LEAST_FOUND, false_positive_weight: float = 0.5
) -> Banding:
    """Choose, among the bands and rows that find enough pairs at the threshold, those with the smallest weighted error:
    the area under the curve below the threshold (pairs that are found and should not be), and the area above the curve
    from the threshold on (pairs that are missed).

    Where no bands find that many, as with few hashes at a low threshold, those that find the most at the threshold.
    `least_found` is the probability with which a pair at the threshold is found, at least; 0 looks at the areas alone,
    which are least together where about half of these pairs are missed. `false_positive_weight` is that of the first
    area; the second has the rest. Raises NapkinError for a number out of range.
    """
    if not 0 < threshold < 1:
        raise NapkinError(f"the threshold is {threshold:g}: use a similarity above 0 and below 1")
    if not 0 <= false_positive_weight <= 1:
        raise NapkinError(f"the weight of false positives is {false_positive_weight:g}: use a number from 0 to 1")
    if not 0 <= least_found < 1:
        raise NapkinError(f"the least probability is {least_found:g}: use a number from 0 to below 1")
    similarity = (np.arange(_POINTS) + 0.5) / _POINTS
    below = similarity < threshold
    # Bands of one row are shared more often than any others.
    best, chosen = np.inf, Banding(hashes, 1)
    for rows in range(1, hashes + 1):
        missed_by_one = 1 - similarity**rows
        bands = np.arange(1, hashes // rows + 1)
        missed = missed_by_one[:, None] ** bands
        error = false_positive_weight * (1 - missed[below]).sum(0) + (1 - false_positive_weight) * missed[~below].sum(0)
        error = np.where(1 - (1 - threshold**rows) ** bands >= least_found, error, np.inf)
        least = int(np.argmin(error))
        if error[least] < best:
            best, chosen = float(error[least]), Banding(int(bands[least]), rows)
    return chosen


SEPARATOR, PART_OF_WORD, WORD = range(3)
_UNICODE = "16.0"
_CASED = ((0x0041, 0x0590), (0x1E00, 0x2000))
# Code points, the last excluded.
_WITHOUT_SPACES = (
    (0x0E00, 0x0F00),
    (0x1000, 0x10A0),
    (0x1780, 0x1800),
    (0x2E80, 0x2FE0),
    (0x3005, 0x3008),
    (0x3040, 0x3100),
    (0x31F0, 0x3200),
    (0x3400, 0x4DC0),
    (0x4E00, 0xA000),
    (0xF900, 0xFB00),
    (0xFF66, 0xFFA0),
    (0x20000, 0x40000),
)


@cache
def word_table() -> NDArray[np.uint32]:
    """The table that compiled loops split text by: 4 · (the code point in lower case) + its kind, for all 1,114,112."""
    classes = character_classes(_UNICODE)
    kind = classes & KIND
    in_words = (kind == LETTER) | (kind == NUMBER) | ((classes & MARK) != 0)
    kinds = np.where(in_words, PART_OF_WORD, SEPARATOR).astype(np.uint32)
    for first, stop in _WITHOUT_SPACES:
        kinds[first:stop][in_words[first:stop]] = WORD
    lower = np.arange(len(classes), dtype=np.uint32)
    for first, stop in _CASED:
        for code in range(first, stop):
            small = chr(code).lower()
            if len(small) == 1:
                lower[code] = ord(small)
    return lower << np.uint32(2) | kinds
