"""Writing documents to files of a corpus: a new one begins after so many bytes of text.

manifest.json of a corpus: what was done, what came out, and checksums of every file. It is written last.
"""

import contextlib
import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import file_digest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from napkin.curation.engine.pipeline_file import OutputFormat
from napkin.curation.stage import Record
from napkin.data.file_sections import SEPARATOR_LINE
from napkin.errors import NapkinError, import_extra, zstandard
from napkin.json_files import read_json

NAME = "manifest.json"
KIND = "napkin corpus"
SCHEMA_VERSION = 1


@dataclass
class Amount:
    """Documents, and their bytes: the UTF-8 of the text, and content of which no text was made yet."""

    documents: int = 0
    bytes: int = 0

    def add(self, n_bytes: int) -> None:
        """Count one more document."""
        self.documents += 1
        self.bytes += n_bytes

    def __iadd__(self, other: "Amount") -> "Amount":
        self.documents += other.documents
        self.bytes += other.bytes
        return self


@dataclass
class StageBooks:
    """The accounts of a stage: what entered, what it dropped by which rule, and what remained."""

    name: str
    version: int = 1
    entered: Amount = field(default_factory=Amount)
    dropped: dict[str, Amount] = field(default_factory=dict)
    remained: Amount = field(default_factory=Amount)

    def __iadd__(self, other: "StageBooks") -> "StageBooks":
        self.entered += other.entered
        self.remained += other.remained
        for rule, amount in other.dropped.items():
            self.dropped[rule] = self.dropped.get(rule, Amount())
            self.dropped[rule] += amount
        return self


@dataclass(frozen=True)
class CorpusFile:
    """A file with documents."""

    name: str
    sha256: str
    file_bytes: int
    documents: int
    text_bytes: int


@dataclass(frozen=True)
class InputBooks:
    """The files that were read, listed in inputs.jsonl."""

    files: int
    bytes: int
    read: Amount
    """Documents that entered the first stage, and their bytes."""


@dataclass(frozen=True)
class Manifest:
    """manifest.json: a corpus, its files, and how it was made."""

    kind: str
    schema_version: int
    napkin: str
    """The version that wrote it."""
    pipeline: dict[str, Any]
    """Every option, as `pipeline_file.values_of` gives it."""
    input: InputBooks
    stages: tuple[StageBooks, ...]
    set_aside: dict[str, int]
    """Counts by reason of what could not be read or processed; set_aside.jsonl lists them."""
    documents: int
    text_bytes: int
    files: tuple[CorpusFile, ...]
    files_of_options: dict[str, str]
    """SHA-256 of each file that an option of a stage names, by path."""
    checksums: dict[str, str]
    """SHA-256 of each other file but meter.json, by its path in the corpus."""


def read_manifest(corpus: Path) -> Manifest:
    """The manifest of a finished corpus. Raises NapkinError where there is none, or it cannot be read."""
    manifest = read_json(corpus / NAME, Manifest)
    if manifest is None or manifest.kind != KIND:
        unfinished = (corpus / ".work").is_dir()
        way_out = "run its `napkin data` command again, which finishes it" if unfinished else "name a corpus"
        raise NapkinError(f"'{corpus}' is not a {'finished ' * unfinished}corpus of `napkin data`: {way_out}")
    if manifest.schema_version != SCHEMA_VERSION:
        raise NapkinError(
            f"'{corpus}' has version {manifest.schema_version} of a corpus's manifest, this napkin reads "
            f"{SCHEMA_VERSION}: use another napkin"
        )
    return manifest


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
