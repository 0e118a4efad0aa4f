"""Reading files of other libraries: whatever is wrong with one is said in a line that names it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import NapkinError
from napkin.files import StrPath


def read_bytes(path: StrPath) -> bytes:
    """All of a file. Raises NapkinError where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name the file of a vocabulary") from error


def decode_json(content: bytes, kind: Any) -> Any:
    """Read JSON into a type, which may be `dict[str, int]` too. Raises NapkinError where it is no JSON, or another."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise NapkinError(f"a value is not what is needed: {error}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise NapkinError(f"it is not JSON ({error})") from error
    except RecursionError as error:
        raise NapkinError("it is nested too deeply to be read") from error


def decode_text(content: bytes) -> str:
    """Read UTF-8. Raises NapkinError where it is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NapkinError(f"it is not UTF-8 at byte {error.start}") from error


@contextmanager
def naming(*paths: StrPath) -> Iterator[None]:
    """Put the files' names before what is wrong with them."""
    try:
        yield
    except NapkinError as error:
        names = " and ".join(f"'{path}'" for path in paths)
        raise NapkinError(f"{names} cannot be used: {error}") from error
