"""JSON lines and Parquet: objects, one per line, or rows, with the text in one field.

Parquet is read by row groups and a few rows at a time.
"""

import json
import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any

import msgspec

from napkin.curation.reading.bounded_stream import FREE_BYTES, ReadLimits, SetAside, Stream, Unreadable, too_large
from napkin.curation.stage import Record
from napkin.errors import first_line, import_extra
from napkin.units import format_bytes

_BLOCK_BYTES = 2**20
_ADDRESSES = ("address", "url", "uri")
_LICENCES = ("licence", "license")
_MOST_LEVELS = 200
"""The deepest nesting of objects and lists: far less than the stack has room for, wherever they are read again."""
_INTEGER_CHARACTERS = 20
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_BATCH_ROWS = 64
_MOST_METADATA_BYTES = 2**26
_KINDS = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def read_jsonl(
    stream: Stream, name: str, limits: ReadLimits, text_field: str, start: int = 0, lines_before: int = 0
) -> Iterator[Record | SetAside]:
    """The documents of a file, or of its part from byte `start` on; the number of each is that of its line. Empty lines
    are none."""
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, (place, line, size) in enumerate(_lines(stream, limits.document_bytes), start=lines_before + 1):
        offset = start + place
        identity = f"{name}#{number}"
        if line is None:
            yield too_large(identity, size, limits, offset)
        elif not line.isspace() and line:
            if offset == 0:
                line = line.removeprefix(BOM_UTF8)
            try:
                values = _decoded(line, decoder)
            except Unreadable as error:
                yield SetAside(identity, error.reason, error.detail, offset)
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


def _decoded(line: bytes, decoder: "msgspec.json.Decoder[dict[str, Any]]") -> dict[str, Any]:
    """An object of JSON as the rest of a pipeline can hold it. Raises Unreadable for anything else.

    A number that 64 bits do not hold becomes the string of its digits, and half a surrogate pair U+FFFD.
    """
    try:
        values = decoder.decode(line)
        # MessagePack, in which records are stored between two passes, cannot hold every integer.
        msgspec.msgpack.encode(values)
        if not _is_deep(values):
            return values
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError):
        # Lines that msgspec refuses may still be valid.
        pass
    try:
        read = json.loads(line.decode(), parse_int=_integer, parse_float=_float, parse_constant=_refuse_constant)
        # Python's own limit may be higher: libraries raise it.
        if isinstance(read, (dict, list)) and _is_deep(read):
            raise RecursionError
        if not isinstance(read, dict):
            raise Unreadable("not JSON", f"it is not an object but {_KINDS.get(type(read), 'a number')}")
        return decoder.decode(_HALF_PAIR.sub("\ufffd", json.dumps(read, ensure_ascii=False)))
    except UnicodeDecodeError as error:
        raise Unreadable("broken encoding", f"not UTF-8 at byte {error.start:,} of the line") from None
    except RecursionError:
        raise Unreadable("nested too deeply", f"it has more than {_MOST_LEVELS} levels") from None
    except ValueError as error:
        raise Unreadable("not JSON", first_line(error)) from None


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= _INTEGER_CHARACTERS and -(2**63) <= int(digits) < 2**64 else digits


def _float(digits: str) -> float | str:
    return value if math.isfinite(value := float(digits)) else digits


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a value of JSON")


def _is_deep(values: Any) -> bool:
    level, n_levels = [values], 0
    while level and n_levels <= _MOST_LEVELS:
        inside = (inner for each in level for inner in (each.values() if isinstance(each, dict) else each))
        level, n_levels = [each for each in inside if isinstance(each, (dict, list))], n_levels + 1
    return n_levels > _MOST_LEVELS


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
        # For a line that is too long, only its size is kept.
        parts = [] if size > limit else [*parts, rest]
    if size:
        yield offset, b"".join(parts) if size <= limit else None, size


def line_starts(stream: Stream, every: int) -> Iterator[tuple[int, int]]:
    """Offsets at which a line begins, each at least `every` bytes after the previous one, and the number of lines
    before it."""
    offset = lines = 0
    wanted = every
    while block := stream.read(_BLOCK_BYTES):
        counted = 0
        while (feed := block.find(b"\n", max(wanted - 1 - offset, counted))) >= 0:
            lines += block.count(b"\n", counted, feed + 1)
            counted = feed + 1
            yield offset + counted, lines
            wanted = offset + counted + every
        lines += block.count(b"\n", counted)
        offset += len(block)


def row_count(file: Any) -> int:
    """The rows of an open file that can be sought. Raises Unreadable where it is damaged."""
    arrow, parquet = import_extra("pyarrow", "a Parquet file"), import_extra("pyarrow.parquet", "a Parquet file")
    try:
        return parquet.read_metadata(file).num_rows
    except (arrow.ArrowException, ValueError, OSError) as error:
        raise Unreadable("damaged", f"as Parquet it cannot be read ({first_line(error)})") from None


def read_parquet(
    file: Any, n_bytes: int, name: str, limits: ReadLimits, text_field: str
) -> Iterator[Record | SetAside]:
    """The documents of an open file of `n_bytes` that can be sought; the number of each is that of its row.

    Raises Unreadable where the file is damaged, or repeats its values more often than `limits.ratio` allows.
    """
    arrow, parquet = import_extra("pyarrow", "a Parquet file"), import_extra("pyarrow.parquet", "a Parquet file")
    number = given = 0
    try:
        table = parquet.ParquetFile(
            file, thrift_string_size_limit=_MOST_METADATA_BYTES, thrift_container_size_limit=_MOST_METADATA_BYTES
        )
        if text_field not in table.schema_arrow.names:
            raise Unreadable("no text", f"it has no column '{text_field}' but {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                identity = f"{name}#{number}"
                encoded = msgspec.json.encode(row, enc_hook=str)
                given += len(encoded)
                if len(encoded) > limits.document_bytes:
                    yield too_large(identity, len(encoded), limits, 0)
                else:
                    # Dates and bytes as JSON has them.
                    yield record_of_fields(msgspec.json.decode(encoded), identity, name, 0, text_field)
            if given > max(FREE_BYTES, limits.ratio * n_bytes):
                raise Unreadable(
                    "zip bomb",
                    f"{format_bytes(n_bytes)} give more than {format_bytes(given)}, the limit is "
                    f"{limits.ratio} per byte",
                )
    except (arrow.ArrowException, msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
        # Arrow's own OSErrors have no number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Unreadable(
            "damaged", f"as Parquet it cannot be read after row {number:,} ({first_line(error)})"
        ) from None
