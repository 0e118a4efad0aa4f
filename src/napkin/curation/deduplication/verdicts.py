"""The decisions about a shard, in a file: which of its records change, and how.

    {"format": "napkin verdicts", "version": 1, "stage": ..., "records": n}
    [record, what was decided]

One line per record that does not stay as it is, in their order; a record is its number in the shard.

Clusters of documents: those that share a key with each other, directly or through others.

A mark for each of many numbers: one bit, in a file where they do not fit into memory.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.compiled import DEDUPLICATION, address_of
from napkin.curation.stage import Record
from napkin.errors import NapkinError
from napkin.files import atomic_file, regular

_V = TypeVar("_V")


class VerdictHeader(msgspec.Struct, frozen=True):
    """The first line of a file of verdicts."""

    stage: str
    records: int
    format: str = "napkin verdicts"
    version: int = 1


def write_verdicts(path: Path, stage: str, records: int, verdicts: Iterable[tuple[int, Any]]) -> None:
    """Write a new file of verdicts (record, what was decided) about the records of a shard, in their order."""
    with atomic_file(path) as file:
        file.write(msgspec.json.encode(VerdictHeader(stage, records)) + b"\n")
        for verdict in verdicts:
            file.write(msgspec.json.encode(verdict) + b"\n")


class Verdicts(Generic[_V]):
    """A file of verdicts of one type, read beside the records of its shard."""

    def __init__(self, path: Path, stage: str, kind: Any) -> None:
        self.path = path
        self._stage, self._kind = stage, kind

    def beside(self, records: Iterable[Record]) -> Iterator[tuple[Record, _V | None]]:
        """Each record with what was decided of it; None where it stays.

        Raises NapkinError if the file is not one of this stage and of as many records.
        """
        with open(self.path, "rb", opener=regular) as file:
            header = self._decoded(file.readline(), VerdictHeader)
            if (header.format, header.version, header.stage) != ("napkin verdicts", 1, self._stage):
                raise self._wrong(f"it is of {header.format!r}, version {header.version}, stage {header.stage!r}")
            lines = (self._decoded(line, tuple[int, self._kind]) for line in file)
            following = next(lines, None)
            count = 0
            for number, record in enumerate(records):
                count += 1
                verdict: _V | None = None
                if following and following[0] == number:
                    verdict, following = following[1], next(lines, None)
                yield record, verdict
            if count != header.records or following:
                raise self._wrong(f"it is of {header.records} records, the shard has {count}")

    def _decoded(self, line: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._wrong(str(error)) from error

    def _wrong(self, why: str) -> NapkinError:
        return NapkinError(f"{str(self.path)!r} does not have the decisions of '{self._stage}' ({why}): make it again")


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

    def set(self, numbers: Numbers) -> None:
        np.bitwise_or.at(self._bits, numbers >> 3, np.uint8(1) << (numbers & 7).astype(np.uint8))

    def between(self, first: int, last: int) -> NDArray[np.bool_]:
        """For each number from `first` to before `last`, True if it is marked."""
        bits = np.unpackbits(self._bits[first >> 3 : (last + 7) >> 3], bitorder="little")
        return bits[first & 7 :][: last - first].astype(np.bool_)

    def at(self, numbers: Numbers) -> NDArray[np.bool_]:
        return (self._bits[numbers >> 3] >> (numbers & 7).astype(np.uint8) & 1).astype(np.bool_)
