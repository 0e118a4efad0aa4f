"""A file's documents, whatever its format."""

import importlib
from collections.abc import Iterator
from typing import Any

from napkin.curation.reading.bounded_stream import (
    Decompressed,
    Plain,
    ReadLimits,
    SetAside,
    Stream,
    Unreadable,
    decompressed,
    read_text,
    too_large,
)
from napkin.curation.reading.input_file import InputFile, open_file
from napkin.curation.reading.jsonl import read_jsonl
from napkin.curation.reading.warc import read_warc
from napkin.curation.stage import Record
from napkin.errors import NapkinError, first_line

_MEDIA_TYPES = {"html": "text/html", "pdf": "application/pdf"}


def read_file(file: InputFile, limits: ReadLimits, text_field: str = "text") -> Iterator[Record | SetAside]:
    """The documents of a file in its order, in memory of a few documents, and what is set aside.

    What is wrong with a file of this machine never raises: it is the last `SetAside`. Raises NapkinError where a
    library is missing, and where an address cannot be read, which may be otherwise the next time.
    """
    try:
        with open_file(file) as opened:
            yield from read_opened(file, opened, limits, text_field)
    except Unreadable as error:
        yield SetAside(file.name, error.reason, error.detail)
    except OSError as error:
        if "://" in file.name:
            raise NapkinError(
                f"'{file.name}' cannot be read ({first_line(error)}): run the same command again, or leave it out"
            ) from None
        yield SetAside(file.name, "unreadable", error.strerror or first_line(error))


def read_opened(
    file: InputFile, opened: Any, limits: ReadLimits, text_field: str = "text"
) -> Iterator[Record | SetAside]:
    """The documents of a file that is open. Raises Unreadable where it is damaged, and OSError."""
    if file.format == "parquet":
        parquet = importlib.import_module("napkin.curation.reading.parquet")
        yield from parquet.read_parquet(opened, file.bytes, file.name, limits, text_field)
        return
    yield from read_stream(file, decompressed(opened, limits.ratio), limits, text_field)


def read_stream(
    file: InputFile, stream: Plain | Decompressed, limits: ReadLimits, text_field: str = "text"
) -> Iterator[Record | SetAside]:
    """The documents of a file of any format but Parquet, from its decompressed bytes. Raises as `read_opened` does."""
    if file.format == "jsonl":
        yield from read_jsonl(stream, file.name, limits, text_field)
    elif file.format == "warc":
        yield from read_warc(stream, file.name, limits)
    elif file.format in _MEDIA_TYPES:
        yield _whole(stream, file.name, _MEDIA_TYPES[file.format], limits)
    else:
        yield from read_text(stream, file.name, limits)
    stream.refuse_rest()


def _whole(stream: Stream, name: str, media_type: str, limits: ReadLimits) -> Record | SetAside:
    """A file that is one document, which a stage makes text of."""
    parts, size = [], 0
    while size <= limits.document_bytes and (part := stream.read(2**20)):
        parts.append(part)
        size += len(part)
    if size > limits.document_bytes:
        return too_large(f"{name}#1", size, limits, 0)
    return Record(f"{name}#1", content=b"".join(parts), media_type=media_type, source=name)
