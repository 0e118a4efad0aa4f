"""Records between two passes of a pipeline: MessagePack, each behind its length, in one zstd stream.

These files are a pipeline's own and are read back by it alone; a truncated one is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from napkin.curation.extra import zstandard
from napkin.curation.record import Record
from napkin.errors import CorruptFile

_LENGTH_BYTES = 8
_LEVEL = 1
"""These files are read once: speed counts more than size."""


class RecordWriter:
    """Writes records to an open file; see `record_writer`."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, record: Record) -> None:
        """Append a record."""
        data = self._encoder.encode(record)
        self._file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
        self._file.write(data)


@contextmanager
def record_writer(path: Path) -> Iterator[RecordWriter]:
    """A new file for records, whole when the block ends; the caller syncs it to disk."""
    with open(path, "xb") as file, zstandard().ZstdCompressor(level=_LEVEL).stream_writer(file) as stream:
        yield RecordWriter(stream)


def read_record_file(path: Path) -> Iterator[Record]:
    """The records of a file, one at a time. Raises CorruptFile where it was cut off."""
    decoder = msgspec.msgpack.Decoder(Record)
    with open(path, "rb") as file, zstandard().ZstdDecompressor().stream_reader(file) as stream:
        while length := _exactly(stream, _LENGTH_BYTES, path, may_end=True):
            yield decoder.decode(_exactly(stream, int.from_bytes(length, "little"), path))


def _exactly(stream: Any, n_bytes: int, path: Path, *, may_end: bool = False) -> bytes:
    data = stream.read(n_bytes)
    while len(data) < n_bytes:
        more = stream.read(n_bytes - len(data))
        if not more:
            if may_end and not data:
                break
            raise CorruptFile(f"'{path}' was cut off: remove the folder it is in, and run the pipeline again")
        data += more
    return data
