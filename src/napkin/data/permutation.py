"""Shuffling without replacement in O(1) memory: a keyed bijection on range(n).

A balanced Feistel network (Luby & Rackoff 1988) on pairs of digits in base ⌈√n⌉ (the generalized form of Black &
Rogaway 2002) permutes range(⌈√n⌉²), at most 2√n + 1 numbers more than needed. An output of n or more goes through the
network again until it is below n (cycle walking), which keeps the map a bijection.
"""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from napkin.errors import NapkinError

_N_ROUNDS = 6
_MAX_N = 2**62
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class KeyedPermutation:
    """A permutation of range(n) chosen by a 64-bit key; calling it maps an array of indices, elementwise.

    The same (n, key) gives the same permutation on every machine. n goes from 1 to 2^62.

    >>> KeyedPermutation(5, key=1)(np.arange(5))
    array([3, 2, 0, 4, 1])
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= _MAX_N:
            raise NapkinError(f"a permutation of {n} elements is not possible: choose from 1 to 2^62")
        if not 0 <= key <= _MASK:
            raise NapkinError(f"a permutation's key of {key} is not possible: choose from 0 to 2^64 - 1")
        self.n = n
        self.key = key
        self._base = np.uint64(isqrt(n - 1) + 1)
        self._round_keys = [np.uint64(random_word(key, number)) for number in range(_N_ROUNDS)]

    def __call__(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Map indices, integers in range(n), to their images, with the same shape.

        Raises IndexError for an index outside range(n).
        """
        if indices.size and not (indices.min() >= 0 and indices.max() < self.n):
            raise IndexError(f"indices must lie in range({self.n})")
        places = self._feistel(indices.astype(np.uint64).ravel())
        while (outside := np.flatnonzero(places >= self.n)).size:
            places[outside] = self._feistel(places[outside])
        return places.reshape(indices.shape).astype(np.int64)

    def _feistel(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(x, self._base)
        for key in self._round_keys:
            left, right = right, (left + _mixed(right + key) % self._base) % self._base
        return left * self._base + right


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output of SplitMix64 (Steele, Lea & Flood 2014): a bit of z flips each bit with p ≈ 1/2."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTORS[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return z ^ (z >> np.uint64(31))


def random_word(key: int, number: int) -> int:
    """Word `number`, from 0, of SplitMix64's stream for a key: 64 bits."""
    z = (key + (number + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FACTORS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _FACTORS[1]) & _MASK
    return z ^ (z >> 31)
