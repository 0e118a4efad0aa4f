r"""Reading the tables, and bringing the installed `regex` library in line with them.

`regex` has the categories of its own version of Unicode, which changes with the library. Where these differ from a
table's, each character is represented by one of the table's category that both agree on, so that the library's patterns
match by the table. Tables are written by generate.py.
"""

import re
import sys
from array import array
from collections import defaultdict
from functools import cache
from pathlib import Path

import regex

from napkin.errors import NapkinError

DEFAULT_VERSION = "16.0"
"""The version of new tokenizers: that of tiktoken and of Hugging Face's tokenizers, so that theirs have the same
ids."""
UNNAMED_VERSION = "18.0"
"""The version of tokenizer files that do not name theirs: that of the `regex` library with which they were made."""
VERSIONS = ("16.0", "18.0")
# White_Space has been the same since Unicode 6.3.
WHITE_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
# A character that is not assigned and never will be.
_NEVER_ASSIGNED = "\uffff"


def check_version(version: str) -> None:
    """Raise NapkinError if there is no table of that version of Unicode."""
    if version not in VERSIONS:
        raise NapkinError(f"character classes of Unicode {version!r} are not known: choose from {', '.join(VERSIONS)}")


@cache
def ranges(version: str) -> tuple[tuple[int, int, str], ...]:
    """The first and the last code point of each range of characters, and their general category."""
    check_version(version)
    lines = Path(__file__).with_name(f"{version}.txt").read_text().splitlines()
    return tuple((int(first, 16), int(last, 16), category) for first, last, category in map(str.split, lines))


@cache
def stand_ins(version: str) -> "StandIns | None":
    """Replacements of the characters of which the installed `regex` has another category; None if there are none."""
    everything = array("I", range(0x110000)).tobytes().decode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass")
    by_category: defaultdict[str, list[str]] = defaultdict(list)
    following = 0
    for first, last, category in ranges(version):
        by_category["Cn"].append(everything[following:first])
        by_category[category].append(everything[first : last + 1])
        following = last + 1
    by_category["Cn"].append(everything[following:])
    table: dict[int, str] = {}
    for category, characters in by_category.items():
        text = "".join(characters)
        wrong = "".join(regex.findall(rf"\P{{{category}}}+", text))
        if wrong:
            agreed = regex.findall(rf"\p{{{category}}}", text)
            # Beyond ASCII, so that a pattern does not name it.
            stand_in = next((each for each in agreed if each > "\x7f"), _NEVER_ASSIGNED)
            table.update(dict.fromkeys(map(ord, wrong), _NEVER_ASSIGNED if category == "Cn" else stand_in))
    return StandIns(table) if table else None


class StandIns:
    """Replaces characters, one by one."""

    def __init__(self, table: dict[int, str]) -> None:
        self._table = table
        starts = [i for i in sorted(table) if i - 1 not in table]
        ends = [i for i in sorted(table) if i + 1 not in table]
        spans = "".join(rf"\U{start:08x}-\U{end:08x}" for start, end in zip(starts, ends, strict=True))
        self._search = re.compile(f"[{spans}]").search

    def apply(self, text: str) -> str:
        """The text as given to the library, of the same length."""
        return text.translate(self._table) if self._search(text) else text
