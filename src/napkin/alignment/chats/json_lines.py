"""Files of JSON lines: an object per line, with errors that name the line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import NapkinError, first_line
from napkin.files import StrPath, regular

MOST_LINE_BYTES = 2**24
"""Of a line: some four million tokens."""


def json_lines(path: StrPath) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file and the numbers of their lines, from 1; lines of white space are none.

    Raises NapkinError where the file cannot be read, and for a line that is not a JSON object or is too long.
    """
    path = Path(path)
    decoder = msgspec.json.Decoder(dict[str, Any])
    try:
        with open(path, "rb", opener=regular) as file:
            number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    raise in_line(path, number, f"has more than {MOST_LINE_BYTES:,} bytes: divide it or leave it out")
                if line.isspace():
                    continue
                try:
                    yield number, decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise in_line(
                        path, number, f"is not a JSON object ({first_line(error)}): mend it or leave it out"
                    ) from None
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a file of JSON lines") from None


def in_line(path: StrPath, number: int, problem: str) -> NapkinError:
    """The error for a line of a file."""
    return NapkinError(f"'{path}' line {number:,} {problem}")
