"""Finds documents with equal keys in bounded memory: a table of keys is sorted in parts, and documents are joined into
clusters.

A table that does not fit is divided by the upper bits of its keys into files, each of which is read in pieces, sorted,
and reduced to the first document of each key before the next piece is added. So memory stays bounded even where most
documents share one key. Clusters and marks (one bit for each of many numbers) go to a file where they do not fit.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.compiled import DEDUPLICATION, address_of
from napkin.curation.deduplication.shard_files import KeyFile, Keys
from napkin.errors import NapkinError

LEAST_MEMORY = 2**22
_MOST_PARTS = 512
_PIECE = 32_768

# Bytes per document while its keys are sorted: keys, numbers and their order, twice, and numpy's own scratch.
_SORTED_BYTES = {1: 96, 2: 128}

Numbers = NDArray[np.int64]


def refuse_little_memory(memory: int) -> None:
    """Raise NapkinError if that is too little to sort in."""
    if memory < LEAST_MEMORY:
        raise NapkinError(f"{memory} bytes of memory for deduplication: it needs {LEAST_MEMORY} or more")


def join_equal_keys(files: Sequence[KeyFile], clusters: "Clusters", scratch: Path, memory: int) -> None:
    """Join documents that share a key in some table; documents are numbered through the files in their order."""
    for table in range(files[0].header.tables if files else 0):
        count, width = sum(map(len, files)), files[0].header.width
        for first, second in equal_pairs(numbered_keys(files, table), count, width, scratch, memory):
            clusters.join(first, second)


def equal_pairs(
    keyed: Iterable[tuple[Keys, Numbers]], count: int, width: int, scratch: Path, memory: int
) -> Iterator[tuple[Numbers, Numbers]]:
    """Pairs (the smallest number that has a key, another number that has it), in at most `memory` bytes.

    `keyed` gives keys of shape [n, width] with their numbers, in ascending order of numbers, `count` at most in all.
    `scratch` is a folder for what does not fit.
    """
    refuse_little_memory(memory)
    room = memory // _SORTED_BYTES[width]
    if sorts_at_once(count, width, memory):
        yield from _pairs_of(keyed, count)
        return
    # Half of the room is for a piece, half for the keys of a part; parts are only about equally large.
    parts = count * 3 // room + 1
    if parts > _MOST_PARTS:
        least = count * 3 * _SORTED_BYTES[width] // (_MOST_PARTS - 1)
        raise NapkinError(f"{memory} bytes of memory for {count} documents or lines: deduplication needs {least}")
    paths = [scratch / f"part-{part:03d}" for part in range(parts)]
    _divide(keyed, paths, memory // 4 // parts)
    for path in paths:
        yield from _pairs_of(_read(path, width, room // 2), room // 2)
        path.unlink()


def sorts_at_once(count: int, width: int, memory: int) -> bool:
    """True if `equal_pairs` gives all pairs together, those of one key next to each other."""
    return count <= memory // _SORTED_BYTES[width]


def numbered_keys(files: Sequence[KeyFile], table: int) -> Iterator[tuple[Keys, Numbers]]:
    """The keys of a table with their numbers, through all files in their order; what has no key is left out."""
    start = 0
    for file in files:
        for keys in file.tables(table):
            # The key 0 belongs to no document.
            kept = np.flatnonzero(keys.any(axis=1))
            yield keys[kept], kept + start
            start += len(keys)


def _divide(keyed: Iterable[tuple[Keys, Numbers]], paths: Sequence[Path], buffering: int) -> None:
    """Write each key, with its number behind it, into the file of its upper bits."""
    with ExitStack() as stack:
        files = [stack.enter_context(open(path, "wb", buffering=max(buffering, 4096))) for path in paths]
        for pieces in _gathered(keyed, _PIECE):
            keys, numbers = _joined(pieces)
            # numpy sorts numbers of 16 bits by radix.
            part = ((keys[:, 0] >> np.uint64(32)) * np.uint64(len(files)) >> np.uint64(32)).astype(np.uint16)
            order = np.argsort(part, kind="stable")
            rows = np.concatenate([keys, numbers[:, None].view(np.uint64)], axis=1)[order]
            ends = np.searchsorted(part[order], np.arange(len(files) + 1, dtype=np.uint16))
            for file, first, last in zip(files, ends[:-1], ends[1:], strict=True):
                file.write(rows[first:last].tobytes())


def _gathered(keyed: Iterable[tuple[Keys, Numbers]], least: int) -> Iterator[list[tuple[Keys, Numbers]]]:
    """The same, at least so many at a time."""
    waiting: list[tuple[Keys, Numbers]] = []
    size = 0
    for each in keyed:
        waiting.append(each)
        size += len(each[1])
        if size >= least:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def _joined(pieces: list[tuple[Keys, Numbers]]) -> tuple[Keys, Numbers]:
    return np.concatenate([keys for keys, _ in pieces]), np.concatenate([numbers for _, numbers in pieces])


def _read(path: Path, width: int, piece: int) -> Iterator[tuple[Keys, Numbers]]:
    with open(path, "rb") as file:
        while rows := file.read(8 * (width + 1) * piece):
            table = np.frombuffer(rows, np.uint64).reshape(-1, width + 1)
            yield table[:, :width], np.ascontiguousarray(table[:, width]).view(np.int64)


def _pairs_of(keyed: Iterable[tuple[Keys, Numbers]], piece: int) -> Iterator[tuple[Numbers, Numbers]]:
    """The pairs of what comes, sorted `piece` numbers at a time with the first of each key from before."""
    known: list[tuple[Keys, Numbers]] = []
    for pieces in _gathered(keyed, piece):
        keys, numbers = _joined([*known, *pieces])
        # Equal keys stay in the order of their numbers.
        order = np.argsort(keys[:, 0], kind="stable") if keys.shape[1] == 1 else np.lexsort((keys[:, 1], keys[:, 0]))
        keys, numbers = keys[order], numbers[order]
        new = np.ones(len(keys), np.bool_)
        new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
        first = np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))
        others = np.flatnonzero(~new)
        known = [(keys[new], numbers[new])]
        yield numbers[first[others]], numbers[others]


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
        """The smallest number of each one's cluster. Do not join afterwards."""
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


class Marks:
    """A set of numbers from 0 to count - 1, a bit each, in the new file `path` if they exceed `memory` bytes."""

    def __init__(self, count: int, path: Path, memory: int) -> None:
        size = count // 8 + 1
        if size <= memory:
            self._bits = np.zeros(size, np.uint8)
        else:
            self._bits = np.asarray(np.memmap(path, np.uint8, "w+", shape=(size,)))

    @property
    def address(self) -> int:
        """Address of the bits: number n is bit n % 8 of byte n // 8."""
        return address_of(self._bits)

    def set(self, numbers: Numbers) -> None:
        np.bitwise_or.at(self._bits, numbers >> 3, np.uint8(1) << (numbers & 7).astype(np.uint8))

    def between(self, first: int, last: int) -> NDArray[np.bool_]:
        """For each number from `first` to before `last`, True if it is marked."""
        bits = np.unpackbits(self._bits[first >> 3 : (last + 7) >> 3], bitorder="little")
        return bits[first & 7 :][: last - first].astype(np.bool_)

    def at(self, numbers: Numbers) -> NDArray[np.bool_]:
        return (self._bits[numbers >> 3] >> (numbers & 7).astype(np.uint8) & 1).astype(np.bool_)
