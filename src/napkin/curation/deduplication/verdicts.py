"""The decisions about a shard, in a file: which of its records change, and how.

    {"format": "napkin verdicts", "version": 1, "stage": ..., "records": n}
    [record, what was decided]

One line per record that does not stay as it is, in their order; a record is its number in the shard.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from napkin.curation.record import Record
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
