r"""Writes the tables of this folder, each from the library whose ids depend on it.

    pip install tiktoken tokenizers regex
    python -m napkin.tokenizer.unicode_tables.generate

A library is asked for the characters of each category by a pattern that matches nothing else. Categories do not name
their version of Unicode, so it is told by how many letters there are.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import regex

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
# The number of letters in each version of Unicode.
LETTERS = {132_028: "14.0", 136_477: "15.0", 137_099: "15.1", 141_028: "16.0", 158_172: "18.0"}
# Without the surrogates, which are not characters.
_EVERYTHING = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
_AT_ONCE = 4096

Matches = Callable[[str, str], str]
"""The characters of a text that a pattern matches."""


def main() -> None:
    """Write a table for each version of Unicode that a library has."""
    libraries: dict[str, Matches] = {"tiktoken": by_tiktoken, "tokenizers": by_tokenizers, "regex": by_regex}
    written: dict[str, list[str]] = {}
    for library, matches in libraries.items():
        categories = categories_of(matches)
        n_letters = sum(category[0] == "L" for category in categories)
        unicode_version = LETTERS.get(n_letters)
        if unicode_version is None:
            raise SystemExit(f"{library} knows {n_letters:,} letters: add their version of Unicode to LETTERS")
        ranges = ranges_of(categories)
        if written.setdefault(unicode_version, ranges) != ranges:
            raise SystemExit(f"{library} has other categories than another library with Unicode {unicode_version}")
        Path(__file__).with_name(f"{unicode_version}.txt").write_text("\n".join(ranges) + "\n")
        print(f"{library} {version(library)}: Unicode {unicode_version}, {len(ranges):,} ranges")


def categories_of(matches: Matches) -> list[str]:
    """The category of each code point; Cn where there is no character."""
    categories = ["Cn"] * 0x110000
    categories[0xD800:0xE000] = ["Cs"] * 0x800
    for category in CATEGORIES:
        for start in range(0, len(_EVERYTHING), _AT_ONCE):
            for character in matches(rf"\p{{{category}}}", _EVERYTHING[start : start + _AT_ONCE]):
                categories[ord(character)] = category
    return categories


def ranges_of(categories: list[str]) -> list[str]:
    """Lines of a first and a last code point, and their category; without those that are not assigned."""
    ranges: list[str] = []
    start = 0
    for category, run in groupby(categories):
        end = start + sum(1 for _ in run)
        if category != "Cn":
            ranges.append(f"{start:X} {end - 1:X} {category}")
        start = end
    return ranges


def by_tiktoken(pattern: str, text: str) -> str:
    """The characters that tiktoken matches: it leaves out the text between matches."""
    tiktoken = import_module("tiktoken")
    bytes_ = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=pattern, mergeable_ranks=bytes_, special_tokens={})
    return bytes(encoding.encode_ordinary(text)).decode()


def by_tokenizers(pattern: str, text: str) -> str:
    tokenizers = import_module("tokenizers")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
    return "".join(piece for piece, _ in split.pre_tokenize_str(text))


def by_regex(pattern: str, text: str) -> str:
    return "".join(regex.findall(pattern, text))


if __name__ == "__main__":
    main()
