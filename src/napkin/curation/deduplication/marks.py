"""A mark for each of many numbers: one bit, in a file where they do not fit into memory."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.clusters import Numbers


class Marks:
    """Which of the numbers from 0 to count - 1 are marked; a bit each, in the new file `path` if they exceed `memory`
    bytes."""

    def __init__(self, count: int, path: Path, memory: int) -> None:
        size = count // 8 + 1
        if size <= memory:
            self._bits = np.zeros(size, np.uint8)
        else:
            self._bits = np.asarray(np.memmap(path, np.uint8, "w+", shape=(size,)))

    def set(self, numbers: Numbers) -> None:
        """Mark numbers."""
        np.bitwise_or.at(self._bits, numbers >> 3, np.uint8(1) << (numbers & 7).astype(np.uint8))

    def between(self, first: int, last: int) -> NDArray[np.bool_]:
        """For each number from `first` to before `last` whether it is marked."""
        bits = np.unpackbits(self._bits[first >> 3 : (last + 7) >> 3], bitorder="little")
        return bits[first & 7 :][: last - first].astype(np.bool_)

    def at(self, numbers: Numbers) -> NDArray[np.bool_]:
        """For each of some numbers whether it is marked."""
        return (self._bits[numbers >> 3] >> (numbers & 7).astype(np.uint8) & 1).astype(np.bool_)
