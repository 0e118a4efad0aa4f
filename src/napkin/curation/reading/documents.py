"""A file's documents, whatever its format.

A text file is one document, or several where lines with only `<|endoftext|>` divide them, as in `napkin.data`.
"""

import re
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
    too_large,
)
from napkin.curation.reading.input_file import InputFile, open_file
from napkin.curation.reading.rows import read_jsonl, read_parquet
from napkin.curation.reading.warc import read_warc
from napkin.curation.stage import Record
from napkin.data.file_sections import SEPARATOR_LINE, has_text
from napkin.errors import NapkinError, first_line

_MEDIA_TYPES = {"html": "text/html", "pdf": "application/pdf"}
_BLOCK_BYTES = 2**20
_PROBE_BYTES = 8192
# At the beginning, or behind a line feed.
_SEPARATOR = re.compile(rb"(?<![^\n])" + re.escape(SEPARATOR_LINE) + rb"\r?\n")
_LAST_SEPARATOR = re.compile(rb"(?<![^\n])" + re.escape(SEPARATOR_LINE) + rb"(?:\r?\n|\Z)")
_UNDECIDED_BYTES = len(SEPARATOR_LINE) + 2


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
        return read_parquet(opened, file.bytes, file.name, limits, text_field)
    return read_stream(file, decompressed(opened, limits.ratio), limits, text_field)


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
        yield from _read_text(stream, file.name, limits)
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


def _read_text(stream: Stream, name: str, limits: ReadLimits) -> Iterator[Record | SetAside]:
    """The documents of a text file, in memory of the largest that is allowed."""
    number = 0
    for offset, data, size in _sections(stream, limits.document_bytes):
        if data is not None and not has_text(data):
            continue
        number += 1
        identity = f"{name}#{number}"
        if data is None:
            yield too_large(identity, size, limits, offset)
            continue
        if offset == 0 and b"\0" in data[:_PROBE_BYTES]:
            yield SetAside(name, "binary", "a NUL in its first 8 KiB")
            return
        try:
            yield Record(identity, data.decode(), source=name, offset=offset)
        except UnicodeDecodeError as error:
            how = f"not UTF-8 at byte {offset + error.start:,}"
            yield SetAside(identity, "broken encoding", how, offset)


def _sections(stream: Stream, limit: int) -> Iterator[tuple[int, bytes | None, int]]:
    """Offset, bytes and size of each section between separator lines; None instead of bytes that are too many."""
    buffer, base, searched = b"", 0, 0
    begin = 0
    """Begin of the section in the file: `base` goes beyond it where the section is too large to be kept."""
    at_end = False
    while not at_end:
        # As much again as there is, so that a long text is not copied for each block.
        block = stream.read(max(_BLOCK_BYTES, len(buffer)))
        at_end = not block
        buffer += block
        pattern = _LAST_SEPARATOR if at_end else _SEPARATOR
        while found := pattern.search(buffer, searched):
            end = base + found.start()
            kept = buffer[: found.start()] if base == begin and end - begin <= limit else None
            yield begin, kept, end - begin
            buffer, base, searched = buffer[found.end() :], base + found.end(), 0
            begin = base
        searched = max(len(buffer) - _UNDECIDED_BYTES, 0)
        if len(buffer) > limit + _UNDECIDED_BYTES:
            # The character before what is kept tells whether a separator begins a line.
            dropped = max(searched - 1, 0)
            buffer, base, searched = buffer[dropped:], base + dropped, searched - dropped
    if buffer or base > begin:
        size = base + len(buffer) - begin
        yield begin, buffer if base == begin and size <= limit else None, size
