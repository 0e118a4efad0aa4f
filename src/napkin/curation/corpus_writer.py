"""Writing documents to files of a corpus: a new one begins after so many bytes of text."""

import contextlib
import gzip
from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from napkin.curation.extra import import_extra, zstandard
from napkin.curation.manifest import CorpusFile
from napkin.curation.pipeline_file import OutputFormat
from napkin.curation.record import Record
from napkin.data.file_sections import SEPARATOR_LINE

_LEVEL = 6
_ROW_GROUP_ROWS = 1000
_ROW_GROUP_BYTES = 2**24


class CorpusWriter:
    """Writes the documents of one shard to `folder`, as files SHARD-000.jsonl.zst, SHARD-001.jsonl.zst ..."""

    def __init__(self, folder: Path, shard: int, output_format: OutputFormat, shard_bytes: int) -> None:
        self._folder, self._shard, self._format, self._most = folder, shard, output_format, shard_bytes
        self._file: _File | None = None
        self._path = folder
        self._documents = self._bytes = 0
        self.files: list[CorpusFile] = []

    def write(self, record: Record, text: bytes) -> None:
        """Append a document, whose text is `text` as UTF-8."""
        if self._file is None:
            begin, name = _OPENERS[self._format], f"{self._shard:05d}-{len(self.files):03d}"
            self._path = self._folder / f"{name}.{'txt' if self._format == 'text' else self._format}"
            self._file = begin(self._path)
        self._file.write(record, text)
        self._documents += 1
        self._bytes += len(text)
        if self._bytes >= self._most:
            self.close()

    def close(self) -> None:
        """Finish the last file."""
        if self._file is None:
            return
        self._file.close()
        with open(self._path, "rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        n_bytes = self._path.stat().st_size
        self.files.append(CorpusFile(self._path.name, digest, n_bytes, self._documents, self._bytes))
        self._file, self._documents, self._bytes = None, 0, 0


def record_values(record: Record) -> dict[str, Any]:
    """A document as a line of JSON has it."""
    return {
        "identity": record.identity,
        "text": record.text,
        "source": record.source,
        "offset": record.offset,
        "address": record.address,
        "licence": record.licence,
        "fields": record.fields,
        "trace": [{"stage": entry.stage, "note": entry.note} for entry in record.trace],
    }


@runtime_checkable
class _File(Protocol):
    def write(self, record: Record, text: bytes) -> None: ...
    def close(self) -> None: ...


class _LineFile:
    """JSON lines, compressed by `compressed`; or texts with separator lines between."""

    def __init__(self, path: Path, compressed: Callable[[Any], Any], *, only_text: bool = False) -> None:
        self._stack = contextlib.ExitStack()
        stack = self._stack
        self._stream = stack.enter_context(compressed(stack.enter_context(open(path, "xb"))))  # noqa: SIM115
        self._only_text, self._is_empty = only_text, True

    def write(self, record: Record, text: bytes) -> None:
        if not self._only_text:
            self._stream.write(msgspec.json.encode(record_values(record)) + b"\n")
            return
        if not self._is_empty:
            self._stream.write(SEPARATOR_LINE + b"\n")
        self._stream.write(text if text.endswith(b"\n") else text + b"\n")
        self._is_empty = False

    def close(self) -> None:
        self._stack.close()


class _ParquetFile:
    """A row per document; `fields` is JSON."""

    def __init__(self, path: Path) -> None:
        arrow, parquet = import_extra("pyarrow", "a Parquet file"), import_extra("pyarrow.parquet", "a Parquet file")
        text = arrow.large_string()
        entry = arrow.struct([("stage", arrow.string()), ("note", arrow.string())])
        columns = [(name, text) for name in ("identity", "text", "source")]
        columns += [("offset", arrow.int64()), ("address", text), ("licence", text), ("fields", text)]
        self._schema = arrow.schema([*columns, ("trace", arrow.list_(entry))])
        self._file = open(path, "xb")  # noqa: SIM115
        self._writer = parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        self._batch = arrow.RecordBatch.from_pylist
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def write(self, record: Record, text: bytes) -> None:
        self._rows.append(record_values(record) | {"fields": msgspec.json.encode(record.fields).decode()})
        self._bytes += len(text)
        if len(self._rows) >= _ROW_GROUP_ROWS or self._bytes >= _ROW_GROUP_BYTES:
            self._write_rows()

    def _write_rows(self) -> None:
        if self._rows:
            self._writer.write_batch(self._batch(self._rows, schema=self._schema))
        self._rows, self._bytes = [], 0

    def close(self) -> None:
        self._write_rows()
        self._writer.close()
        self._file.close()


def _as_gzip(file: Any) -> Any:
    # Without a name and a time, so that the same documents give the same bytes.
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=_LEVEL)


def as_zstd(file: Any) -> Any:
    """A stream that writes zstd to a file and, when it is closed, ends it."""
    return zstandard().ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False)


_OPENERS: dict[str, Callable[[Path], _File]] = {
    "jsonl.zst": lambda path: _LineFile(path, as_zstd),
    "jsonl.gz": lambda path: _LineFile(path, _as_gzip),
    "jsonl": lambda path: _LineFile(path, contextlib.nullcontext),
    "parquet": _ParquetFile,
    "text": lambda path: _LineFile(path, contextlib.nullcontext, only_text=True),
}
