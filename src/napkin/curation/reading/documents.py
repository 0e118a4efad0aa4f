"""A file's documents, whatever its format.

A text file is one document, or several where lines with only `<|endoftext|>` divide them, as in `napkin.data`.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
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
from napkin.curation.reading.rows import line_starts, read_jsonl, read_parquet
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
    if file.start is None:
        return read_stream(file, decompressed(opened, limits.ratio), limits, text_field)
    opened.seek(file.start)
    return read_stream(file, Plain(_Part(opened, file.bytes), b""), limits, text_field)


def read_stream(
    file: InputFile, stream: Plain | Decompressed, limits: ReadLimits, text_field: str = "text"
) -> Iterator[Record | SetAside]:
    """The documents of a file of any format but Parquet, from its decompressed bytes. Raises as `read_opened` does."""
    start = file.start or 0
    if file.format == "jsonl":
        yield from read_jsonl(stream, file.name, limits, text_field, start, file.number)
    elif file.format == "warc":
        yield from read_warc(stream, file.name, limits)
    elif file.format in _MEDIA_TYPES:
        yield _whole(stream, file.name, _MEDIA_TYPES[file.format], limits)
    else:
        yield from _read_text(stream, file.name, limits, start, file.number)
    stream.refuse_rest()


class _Part:
    """The next `n_bytes` of a file."""

    def __init__(self, file: Any, n_bytes: int) -> None:
        self._file, self._left = file, n_bytes

    def read(self, n_bytes: int, /) -> bytes:
        data = self._file.read(min(n_bytes, self._left))
        self._left -= len(data)
        return data


def divide_file(file: InputFile, limits: ReadLimits, part_bytes: int) -> list[InputFile]:
    """Divide a file into parts of at least `part_bytes`, which can be read in parallel and together give the file's
    documents.

    Lines of JSON, and texts between separator lines, of a file of this machine that is not compressed; any other file
    is one part. All of it is read once, to number its documents.
    """
    if file.bytes <= part_bytes or "://" in file.name or file.format not in ("jsonl", "text"):
        return [file]
    starts = [(0, 0)]
    try:
        with open_file(file) as opened:
            # A file that is not text is reported as a whole by its reader.
            if not isinstance(decompressed(opened, limits.ratio), Plain):
                return [file]
            opened.seek(0)
            if file.format == "text" and b"\0" in opened.read(_PROBE_BYTES):
                return [file]
            opened.seek(0)
            find = line_starts if file.format == "jsonl" else partial(_section_starts, limit=limits.document_bytes)
            starts += find(Plain(opened, b""), part_bytes)
    except OSError:
        return [file]
    ends = [*(start for start, _ in starts[1:]), file.bytes]
    parts = [
        replace(file, bytes=end - start, start=start, number=number)
        for (start, number), end in zip(starts, ends, strict=True)
        if start < end
    ]
    return parts if len(parts) > 1 else [file]


def _section_starts(stream: Stream, every: int, limit: int) -> Iterator[tuple[int, int]]:
    """Offsets at which a document begins, each at least `every` bytes after the previous one, and the number of
    documents before it."""
    number, wanted = 0, every
    for offset, data, _ in _sections(stream, limit):
        if offset >= wanted:
            yield offset, number
            wanted = offset + every
        number += data is None or has_text(data)


def _whole(stream: Stream, name: str, media_type: str, limits: ReadLimits) -> Record | SetAside:
    """A file that is one document, which a later stage converts to text."""
    parts, size = [], 0
    while size <= limits.document_bytes and (part := stream.read(2**20)):
        parts.append(part)
        size += len(part)
    if size > limits.document_bytes:
        return too_large(f"{name}#1", size, limits, 0)
    return Record(f"{name}#1", content=b"".join(parts), media_type=media_type, source=name)


def _read_text(stream: Stream, name: str, limits: ReadLimits, start: int, number: int) -> Iterator[Record | SetAside]:
    """The documents of a text file from `start` on, before which there are `number`, in memory of the largest that is
    allowed."""
    for place, data, size in _sections(stream, limits.document_bytes):
        offset = start + place
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
        # Read as much again as there is already, so that a long text is not copied for each block.
        block = stream.read(max(_BLOCK_BYTES, len(buffer)))
        at_end = not block
        buffer += block
        pattern = _LAST_SEPARATOR if at_end else _SEPARATOR
        while match := pattern.search(buffer, searched):
            end = base + match.start()
            kept = buffer[: match.start()] if base == begin and end - begin <= limit else None
            yield begin, kept, end - begin
            buffer, base, searched = buffer[match.end() :], base + match.end(), 0
            begin = base
        searched = max(len(buffer) - _UNDECIDED_BYTES, 0)
        if len(buffer) > limit + _UNDECIDED_BYTES:
            # The character before the kept ones tells whether a separator begins a line.
            dropped = max(searched - 1, 0)
            buffer, base, searched = buffer[dropped:], base + dropped, searched - dropped
    if buffer or base > begin:
        size = base + len(buffer) - begin
        yield begin, buffer if base == begin and size <= limit else None, size
