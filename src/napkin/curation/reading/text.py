"""Text files: one document, or several where lines with only `<|endoftext|>` divide them, as in `napkin.data`."""

import re
from collections.abc import Iterator

from napkin.curation.reading.bounded_stream import Stream
from napkin.curation.reading.set_aside import ReadLimits, SetAside
from napkin.curation.record import Record
from napkin.data.file_sections import SEPARATOR_LINE, has_text
from napkin.units import format_bytes

_BLOCK_BYTES = 2**20
_PROBE_BYTES = 8192
# At the beginning, or behind a line feed.
_SEPARATOR = re.compile(rb"(?<![^\n])" + re.escape(SEPARATOR_LINE) + rb"\r?\n")
_LAST_SEPARATOR = re.compile(rb"(?<![^\n])" + re.escape(SEPARATOR_LINE) + rb"(?:\r?\n|\Z)")
_UNDECIDED_BYTES = len(SEPARATOR_LINE) + 2


def read_text(stream: Stream, name: str, limits: ReadLimits) -> Iterator[Record | SetAside]:
    """The documents of a text file, in memory of the largest that is allowed."""
    number = 0
    for offset, data, size in _sections(stream, limits.document_bytes):
        if data is not None and not has_text(data):
            continue
        number += 1
        identity = f"{name}#{number}"
        if data is None:
            yield too_large(identity, size, limits, offset)
        elif offset == 0 and b"\0" in data[:_PROBE_BYTES]:
            yield SetAside(name, "binary", "a NUL in its first 8 KiB")
            return
        else:
            yield text_record(identity, name, data, offset)


def text_record(identity: str, name: str, data: bytes, offset: int) -> Record | SetAside:
    """A document of UTF-8."""
    try:
        return Record(identity, data.decode(), source=name, offset=offset)
    except UnicodeDecodeError as error:
        return SetAside(identity, "broken encoding", f"not UTF-8 at byte {offset + error.start:,}", offset)


def too_large(identity: str, size: int, limits: ReadLimits, offset: int) -> SetAside:
    """A document that is larger than the limit."""
    detail = f"{format_bytes(size)} > {format_bytes(limits.document_bytes)}"
    return SetAside(identity, "too large", detail, offset)


def _sections(stream: Stream, limit: int) -> Iterator[tuple[int, bytes | None, int]]:
    """Offset, bytes and size of each section between separator lines; None instead of bytes that are too many."""
    buffer, base, searched = b"", 0, 0
    begin = 0
    """Of the section in the file: `base` goes beyond it where the section is too large to be kept."""
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
