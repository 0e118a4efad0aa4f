"""JSON lines: an object per line, of which one field is the text."""

from collections.abc import Iterator
from typing import Any

import msgspec

from napkin.curation.reading.bounded_stream import Stream
from napkin.curation.reading.set_aside import ReadLimits, SetAside
from napkin.curation.reading.text import too_large
from napkin.curation.record import Record
from napkin.errors import first_line

_BLOCK_BYTES = 2**20
_ADDRESSES = ("address", "url", "uri")
_LICENCES = ("licence", "license")


def read_jsonl(stream: Stream, name: str, limits: ReadLimits, text_field: str) -> Iterator[Record | SetAside]:
    """The documents of a file; the number of each is that of its line. Empty lines are none."""
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, (offset, line, size) in enumerate(_lines(stream, limits.document_bytes), start=1):
        identity = f"{name}#{number}"
        if line is None:
            yield too_large(identity, size, limits, offset)
        elif not line.isspace() and line:
            try:
                values = decoder.decode(line)
            except (msgspec.DecodeError, RecursionError, ValueError) as error:
                yield SetAside(identity, *_what_is_wrong(line, error), offset)
                continue
            yield record_of_fields(values, identity, name, offset, text_field)


def record_of_fields(
    values: dict[str, Any], identity: str, name: str, offset: int, text_field: str
) -> Record | SetAside:
    """The document that a row is: its text, where it was published and its licence; all else goes to `fields`."""
    text = values.pop(text_field, None)
    if not isinstance(text, str):
        how = "has no field" if text is None else f"has {type(text).__name__} in the field"
        return SetAside(identity, "no text", f"it {how} '{text_field}'", offset)
    address, licence = _taken(values, _ADDRESSES), _taken(values, _LICENCES)
    return Record(identity, text, source=name, offset=offset, address=address, licence=licence, fields=values)


def _taken(values: dict[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if isinstance(values.get(name), str):
            return values.pop(name)
    return ""


def _what_is_wrong(line: bytes, error: Exception) -> tuple[str, str]:
    try:
        line.decode()
    except UnicodeDecodeError as broken:
        return "broken encoding", f"not UTF-8 at byte {broken.start:,} of the line"
    return "not JSON", "nested too deeply" if isinstance(error, RecursionError) else first_line(error)


def _lines(stream: Stream, limit: int) -> Iterator[tuple[int, bytes | None, int]]:
    """Offset, bytes and size of each line; None instead of the bytes of one of more than `limit`."""
    offset, size = 0, 0
    parts: list[bytes] = []
    while block := stream.read(_BLOCK_BYTES):
        *ended, rest = block.split(b"\n")
        for piece in ended:
            size += len(piece)
            if size > limit:
                yield offset, None, size
            else:
                yield offset, b"".join([*parts, piece]) if parts else piece, size
            offset += size + 1
            parts, size = [], 0
        size += len(rest)
        # Of a line that is too long, only its size is kept.
        parts = [] if size > limit else [*parts, rest]
    if size:
        yield offset, b"".join(parts) if size <= limit else None, size
