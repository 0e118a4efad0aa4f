"""JSON files that napkin writes and reads again: those of a run, and what was measured on this machine.

A run's file is written with a checksum, and read as from a stranger: whatever is in it, reading gives values of the
declared types and ranges, or one line that names the file, the field, its value and the limit. A measurement is kept
between processes, one file in the user's cache for each thing (NAPKIN_CACHE_DIR, if set); one that is malformed, or
larger than anything that is kept, counts as none: it is measured again and the file replaced.
"""

import hashlib
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import atomic_write_text, cache_folder, read_bytes, regular

T = TypeVar("T")

LARGEST = 1e40
"""Largest figure: no FLOPs, bytes or seconds are more, and products of larger numbers overflow. A class may name
exceptions in UNBOUNDED."""
_MOST_BYTES = 2**33


def format_json(value: Any) -> str:
    """The text of a run's JSON file: an object, its checksum the last field."""
    return add_checksum(json.dumps(msgspec.to_builtins(value), indent=2)) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a run's JSON file atomically, replacing an earlier one."""
    atomic_write_text(path, format_json(value), overwrite=True)


def read_json(path: Path, kind: type[T]) -> T | None:
    """Read a run's JSON file as `kind`; None where it does not exist.

    Raises CorruptFile where it was damaged, has other fields or a value that cannot be one; NapkinError where it cannot
    be read.
    """
    data = read_if_present(path)
    if data is None:
        return None
    try:
        return decode_json(data, kind)
    except (ValueError, RecursionError) as error:
        raise malformed(path, error) from None


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode a JSON object with or without a checksum. Raises ValueError or RecursionError."""
    has_checksum = verify_checksum(data)
    values = msgspec.json.decode(data, type=dict[str, Any])
    if not has_checksum and FIELD in values:
        raise ValueError(f"its field {FIELD!r} is not the last one, or is not a checksum")
    values.pop(FIELD, None)
    refuse_extremes({name: value for name, value in values.items() if name not in getattr(kind, "UNBOUNDED", ())})
    if not has_checksum:
        # Where a checksum was damaged beyond recognition, it is a field that does not exist.
        refuse_unknown(values, kind)
    return msgspec.convert(values, kind)


def refuse_unknown(values: dict[str, Any], kind: Any) -> None:
    """Raise ValueError for a name that is not a field of `kind`."""
    names = getattr(kind, "__dataclass_fields__", None)
    if names is None:
        return
    for name in values:
        if name not in names:
            raise ValueError(f"{name[:40]!r} is not one of its fields")


def refuse_extremes(value: Any, place: str = "") -> None:
    """Raise ValueError, naming the field, for a number that is not finite or is beyond `LARGEST`."""
    if isinstance(value, dict):
        for name, each in value.items():
            refuse_extremes(each, f"{place}.{name[:40]}" if place else name[:40])
    elif isinstance(value, list):
        for position, each in enumerate(value):
            refuse_extremes(each, f"{place}[{position}]")
    elif isinstance(value, int | float) and not isinstance(value, bool) and not -LARGEST <= value <= LARGEST:
        shown = f"{value:g}" if isinstance(value, float) or value.bit_length() < 1000 else "a number of many digits"
        raise ValueError(f"{place or 'its value'} is {shown}: at most {LARGEST:g} can be a figure")


def read_if_present(path: Path) -> bytes | None:
    """The bytes of a run's file; None where it does not exist. Raises NapkinError where it cannot be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): make it a readable file") from error
    if len(data) > _MOST_BYTES:
        raise malformed(path, ValueError(f"it has more than {_MOST_BYTES:,} bytes"))
    return data


def malformed(path: Path, error: Exception) -> CorruptFile:
    """The error that names a file of a run and what is wrong with it."""
    how = "it is nested too deeply" if isinstance(error, RecursionError) else first_line(error)
    return CorruptFile(f"'{path}' is malformed ({how}): restore the file, or move it away to go on without it")


# The last field of a JSON object in a run's folder is the CRC-32 of all bytes of the object before it:
#
#     {"step": 1, "tokens": 512, "loss": 5.54, "previous_step": 0, "crc32": "9ae0daaf"}
#
# CRC-32 (ISO 3309, as in zlib, gzip and PNG) notices every flipped bit and every run of up to 32 damaged bits. The
# object stays JSON that other programs read, and objects of older runs, without the field, stay readable.
FIELD = "crc32"

_AT_THE_END = re.compile(rb',\s*"crc32": "([0-9a-f]{8})"\s*\}\s*\Z')


def add_checksum(text: str) -> str:
    """The text of a JSON object that is not empty, with its checksum as the last field."""
    fields = text.rstrip().removesuffix("}").rstrip()
    before, end = (",\n  ", "\n}") if "\n" in fields else (", ", "}")
    return f'{fields}{before}"{FIELD}": "{crc32(fields.encode())}"{end}'


def verify_checksum(data: bytes) -> bool:
    """Return whether a JSON object has a checksum. Raises ValueError where it is not that of the bytes before it."""
    match = _AT_THE_END.search(data)
    if match is None:
        return False
    actual = crc32(data[: match.start()])
    if match[1].decode() != actual:
        raise ValueError(f"its checksum is {match[1].decode()}, that of its contents {actual}")
    return True


def crc32(data: bytes) -> str:
    """CRC-32 in hexadecimal."""
    return f"{zlib.crc32(data):08x}"


_MOST_CACHED_BYTES = 2**24


def cache_path(kind: str, what: Any) -> Path:
    """The file in the cache for a measurement of one kind, of anything that JSON can say."""
    key = hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]
    return cache_folder() / f"{kind}-{key}.json"


def cached_files(kind: str) -> list[Path]:
    """The files of all measurements of one kind."""
    return sorted(cache_folder().glob(f"{kind}-" + "[0-9a-f]" * 16 + ".json"))


def read_cached(path: Path, kind: type[T]) -> T | None:
    """Read what `write_cached` has written; None if there is no such file, or it is not a valid `kind`."""
    try:
        if os.stat(path).st_size > _MOST_CACHED_BYTES:
            return None
        return msgspec.json.decode(read_bytes(path), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write_cached(path: Path, measured: Any) -> None:
    """Write what was measured as indented JSON, replacing an older file.

    Raises OSError or NapkinError where it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(measured), indent=2).decode()
    atomic_write_text(path, text + "\n", overwrite=True)
