"""TOML that anyone may have written, parsed in a time that does not grow with the square of its size.

The standard library's parser takes that time for keys of many parts, `a.a.a.a = 1`.
"""

import re
import tomllib
from typing import Any

MAX_DOTS = 32

_STRING_OR_COMMENT = re.compile(
    r"""
    ["]{3} (?: \\. | (?!["]{3}) [^\\] )*+ (?: ["]{3,5}+ | \Z )
    | [']{3} (?: (?![']{3}) . )*+ (?: [']{3,5}+ | \Z )
    | ["] (?: \\. | [^"\\\n] )*+ ["]
    | ['] [^'\n]*+ [']
    | [#] [^\n]*+
    """,
    re.DOTALL | re.VERBOSE,
)
_DEEP_KEY = re.compile(rf"(?:\.[ \t]*+[\w-]++[ \t]*+){{{MAX_DOTS + 1}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML document says.

    Raises tomllib.TOMLDecodeError if it is none; ValueError for a key of more than MAX_DOTS dots or a number of
    thousands of digits, RecursionError for values within values.
    """
    # What is left of the text are keys, numbers and dates, of which only keys have more than a few dots.
    if _DEEP_KEY.search(_STRING_OR_COMMENT.sub("_", text)):
        raise ValueError(f"a key has more than {MAX_DOTS} dots")
    return tomllib.loads(text)
