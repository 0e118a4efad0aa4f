"""TOML that anyone may have written, read in bounded memory and time, or refused in one line; and napkin's own tables.

The standard library's parser takes a time that grows with the square of the size for keys of many parts, `a.a.a = 1`:
such keys are refused before.
"""

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import NapkinError
from napkin.files import StrPath, regular

MOST_BYTES = 2**20
MAX_DOTS = 32

# No group is repeated without a way back: Python before 3.11.5 matches such groups wrongly. A string that is never
# closed ends with its line: if it did not match, each quote within it would be tried again.
_STRING_OR_COMMENT = re.compile(
    r"""
    ["]{3} [^"\\]*+ (?: (?: \\. | ["]{1,2} (?!["]) ) [^"\\]*+ )* (?: ["]{3,5}+ | \Z )
    | [']{3} [^']*+ (?: [']{1,2} (?![']) [^']*+ )* (?: [']{3,5}+ | \Z )
    | ["] [^"\\\n]*+ (?: \\. [^"\\\n]*+ )* ["]?+
    | ['] [^'\n]*+ [']?+
    | [#] [^\n]*+
    """,
    re.DOTALL | re.VERBOSE,
)
_DEEP_KEY = re.compile(rf"(?:\.[ \t]*+[\w-]++[ \t]*+){{{MAX_DOTS + 1}}}")


def read_toml(path: StrPath, what: str, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Read a TOML file, which may begin with a byte order mark.

    Args:
        path: the file.
        what: that it should be, for messages: "a recipe, a TOML file".
        most_bytes: a larger file is refused before it is read.

    Raises NapkinError for a file that cannot be read, is too large, or is not TOML.
    """
    path = Path(path)
    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise NapkinError(f"'{path}' does not exist: name {what}") from None
    except (OSError, ValueError) as error:
        # A name with a null character is a ValueError.
        why = getattr(error, "strerror", None) or error
        raise NapkinError(f"'{path}' cannot be read ({why}): name {what}") from None
    if len(data) > most_bytes:
        raise NapkinError(f"'{path}' has more than {most_bytes:,} bytes: name {what}")
    try:
        return parse_toml(data.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NapkinError(f"'{path}' is not TOML ({error}): correct it there") from None
    except RecursionError:
        raise NapkinError(f"'{path}' holds a value that cannot be read (nested too deeply): correct it") from None
    except ValueError as error:
        raise NapkinError(f"'{path}' holds a value that cannot be read ({error}): correct it") from None


def packaged_toml(package: str, name: str, kind: Any, table: str | None = None) -> Any:
    """One of napkin's own tables: a file of a package, or one table of it, as values of a type."""
    values = tomllib.loads(resources.files(package).joinpath(name).read_text("utf-8"))
    return msgspec.convert(values if table is None else values[table], kind)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises tomllib.TOMLDecodeError if it is none; ValueError for a key of more than MAX_DOTS dots or a number of
    thousands of digits, RecursionError for values within values.
    """
    # The rest of the text is keys, numbers and dates, of which only keys have more than a few dots.
    if _DEEP_KEY.search(_STRING_OR_COMMENT.sub("_", text)):
        raise ValueError(f"a key has more than {MAX_DOTS} dots")
    return tomllib.loads(text)
