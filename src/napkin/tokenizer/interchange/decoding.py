"""Reading files of other libraries, with errors that name the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from napkin import files
from napkin.errors import NapkinError
from napkin.files import StrPath


def read_bytes(path: StrPath) -> bytes:
    """The contents of a file. Raises NapkinError if it cannot be read."""
    try:
        return files.read_bytes(path)
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a vocabulary file") from error


def decode_json(content: bytes, kind: Any) -> Any:
    """Decode JSON as a type, such as `dict[str, int]`. Raises NapkinError if it is not JSON or not of that type."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise NapkinError(f"a value is not of the expected type: {error}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise NapkinError(f"it is not JSON ({error})") from error
    except RecursionError as error:
        raise NapkinError("it is nested too deeply to be read") from error


def decode_text(content: bytes) -> str:
    """Decode UTF-8. Raises NapkinError if it is not valid."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NapkinError(f"it is not UTF-8 at byte {error.start}") from error


@contextmanager
def naming(*paths: StrPath) -> Iterator[None]:
    """Prefix the messages of errors with the names of the files."""
    try:
        yield
    except NapkinError as error:
        names = " and ".join(f"'{path}'" for path in paths)
        raise NapkinError(f"{names} cannot be used: {error}") from error
