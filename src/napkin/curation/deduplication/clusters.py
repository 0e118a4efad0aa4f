"""Clusters of documents: those that share a key with each other, directly or through others."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.compiled.loading import DEDUPLICATION, address_of

Numbers = NDArray[np.int64]


class Clusters:
    """A partition of the numbers from 0 to count - 1, joined pair by pair.

    It takes 8 bytes per number, in a file in `scratch` where that is more than `memory`.
    """

    def __init__(self, count: int, scratch: Path, memory: int) -> None:
        DEDUPLICATION.load("union_find")
        self._parents = numbers_array(count, scratch / "parents", memory)
        step = 2**20
        for start in range(0, count, step):
            self._parents[start : start + step] = np.arange(start, min(start + step, count))

    def join(self, first: Numbers, second: Numbers) -> None:
        """Put first[i] and second[i] into one cluster."""
        from napkin.curation.deduplication.compiled.union_find import join_pairs

        first, second = np.ascontiguousarray(first), np.ascontiguousarray(second)
        join_pairs(address_of(self._parents), address_of(first), address_of(second), len(first))

    def roots(self) -> Numbers:
        """For each number the smallest of its cluster. Do not join afterwards."""
        from napkin.curation.deduplication.compiled.union_find import flatten

        flatten(address_of(self._parents), len(self._parents))
        return self._parents


def numbers_array(count: int, path: Path, memory: int) -> Numbers:
    """An array of `count` int64 zeros: in memory, or in the new file `path` where it is larger than `memory` bytes."""
    if 8 * count <= memory:
        return np.zeros(count, np.int64)
    return np.asarray(np.memmap(path, np.int64, "w+", shape=(count,)))


def lists_of(roots: Numbers) -> list[list[int]]:
    """The clusters of two members or more, each in ascending order, by their smallest member."""
    order = np.argsort(roots, kind="stable")
    edges = np.flatnonzero(np.diff(roots[order])) + 1
    return [group.tolist() for group in np.split(order, edges) if len(group) > 1]
