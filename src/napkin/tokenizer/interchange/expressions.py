r"""Pre-tokenization patterns as other libraries spell them.

One engine's `\p{N}{1,3}+` is possessive, another's repeats; a `$` is the text's end or each line's. So a pattern is
known by its spelling, or made of parts that mean the same to all: letters and signs, classes, `?`, `*`, `+`, `{1,3}`,
groups, `|`, and looking ahead. Characters that one engine's edition of Unicode does not know yet may still differ.
"""

import regex

from napkin.errors import NapkinError
from napkin.tokenizer.patterns import PATTERNS

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WHITE_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

# Names in napkin, and spellings that all engines read alike: the first of them is written.
_KNOWN: dict[str, tuple[str, ...]] = {
    "gpt2": (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ),
    "gpt4": (_SUFFIXES + _WORDS + _WHITE_SPACE, "'(?i:[sdmt]|ll|ve|re)" + _WORDS + _WHITE_SPACE),
    # As tiktoken has it: white space that ends the text is one piece.
    "cl100k": (_SUFFIXES + _WORDS + r"|\s+(?![\s\S])" + _WHITE_SPACE,),
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SUFFIXES}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SUFFIXES}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _WHITE_SPACE,
    ),
}

_CLASS = r"\\[pP]\{[A-Z][a-z]?\}|\\[sSdDrnt]|\\[^\w\s]"
_COMMON = regex.compile(
    rf"{_CLASS}|\[\^?(?:{_CLASS}|[^\[\]\\&|~^-]|(?<=\w)-(?=\w))+\]|\(\?[:=!]|\((?!\?)|[)|.]"
    r"|[?*+](?![?*+])|\{\d+(?:,\d*)?\}(?![?*+{])|[^\\\[\](){}|.?*+^$]"
)


def known_pattern(spelling: str) -> str | None:
    """napkin's name of a pattern that is spelled or called so, None if it is none of the known ones."""
    for name, spellings in _KNOWN.items():
        if spelling in (name, *spellings):
            return name if name in PATTERNS else spellings[0]
    return None


def spelling_of(pattern: str) -> str:
    """napkin's `pattern` as a regular expression: the usual one where it is known."""
    for name, spellings in _KNOWN.items():
        if pattern in (name, *spellings):
            return spellings[0]
    return PATTERNS.get(pattern, pattern)


def common_spelling(pattern: str) -> str:
    """A spelling of napkin's `pattern` that all engines read alike.

    Raises NapkinError where it has a part that they may read differently.
    """
    spelling = spelling_of(pattern)
    if known_pattern(spelling):
        return spelling
    place = 0
    while place < len(spelling):
        part = _COMMON.match(spelling, place)
        if part is None:
            raise NapkinError(
                f"the pattern {spelling!r} has {spelling[place : place + 8]!r} at character {place}, which engines of "
                "regular expressions read differently: use a known pattern, or classes, groups and repeats alone"
            )
        place = part.end()
    return spelling
