"""How text is cut into pre-tokens, the pieces within which byte pairs may merge.

A pattern is a regular expression of the `regex` library; its matches are the pre-tokens. What lies between
two matches is kept as a pre-token of its own, so that no pattern can lose text.
"""

import operator
import re
from collections.abc import Iterator

import regex

from napkin.errors import NapkinError

# Where the originals repeat greedily at the end of an alternative, these repeat possessively: the same matches,
# and no positions kept for going back.
PATTERNS: dict[str, str] = {
    # GPT-2 (Radford et al. 2019): English contractions; a word, a number or a run of signs, each with one space
    # before it; white space, of which the last is left to the word that follows.
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s",
    # GPT-4 as published first, Llama 3: contractions in any case, a word with any one sign before it, numbers
    # of at most three digits, line ends kept with the signs or white space before them.
    "gpt4": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    # The same as OpenAI's tiktoken has it since: white space at the end of a text is one pre-token, line ends and all.
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++\Z|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    # GPT-4o: a word may begin with capitals, ends where small letters are followed by a capital and takes its
    # contraction with it; marks are letters; signs keep line ends and slashes.
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]++(?i:'(?:[sdmt]|ll|ve|re))?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]++[\p{Ll}\p{Lm}\p{Lo}\p{M}]*+(?i:'(?:[sdmt]|ll|ve|re))?"
        r"|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n/]*+|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    # No pre-tokenization: merges may cross words and lines.
    "whole": r"(?s:.+)",
}


_SHORT = 2**14


class PreTokenizer:
    """Cuts text by a pattern: the name of one of PATTERNS, or any other regular expression.

    Raises NapkinError if it is neither.
    """

    def __init__(self, pattern: str) -> None:
        self._may_leave_gaps = pattern not in PATTERNS
        self._find_in_ascii = None if self._may_leave_gaps else re.compile(in_ascii(PATTERNS[pattern])).findall
        try:
            self._compiled = regex.compile(PATTERNS.get(pattern, pattern))
        except regex.error as error:
            raise NapkinError(
                f"{pattern!r} is no regular expression ({error}): write one, or one of {', '.join(PATTERNS)}"
            ) from error

    def split(self, text: str) -> Iterator[str]:
        """Yield the pre-tokens of `text` in order; joined they are `text`.

        >>> list(PreTokenizer("gpt2").split("it's  42 cats!"))
        ['it', "'s", ' ', ' 42', ' cats', '!']
        >>> list(PreTokenizer("[0-9]+").split("a1b22"))
        ['a', '1', 'b', '22']
        """
        if self._may_leave_gaps:
            return self._matches_and_gaps(text)
        # Python's own `re` is three times as fast, and a list faster than an iterator of which there is no need.
        if len(text) <= _SHORT and text.isascii() and self._find_in_ascii:
            return iter(self._find_in_ascii(text))
        return map(operator.itemgetter(0), self._compiled.finditer(text))

    def _matches_and_gaps(self, text: str) -> Iterator[str]:
        # What was yielded is text[:done], also where a pattern matches nothing, the empty string or backwards.
        done = 0
        for match in self._compiled.finditer(text):
            start, end = max(match.start(), done), match.end()
            if start > done:
                yield text[done:start]
            if end > start:
                yield text[start:end]
            done = max(start, end)
        if done < len(text):
            yield text[done:]


# What the classes of characters that patterns name are in ASCII, as ranges; of all others ASCII has no character.
_IN_ASCII = {r"\p{L}": "A-Za-z", r"\p{Lu}": "A-Z", r"\p{Ll}": "a-z", r"\p{N}": "0-9", r"\s": r"\t-\r "}


def in_ascii(pattern: str) -> str:
    r"""The same pattern without properties of Unicode, for text that is all ASCII.

    >>> in_ascii(r" ?[^\s\p{L}\p{M}]++|\s+(?!\S)")
    ' ?[^\\t-\\r A-Za-z]++|[\\t-\\r ]+(?![^\\t-\\r ])'
    """
    parts: list[str] = []
    in_brackets = False
    for part in re.split(r"(\\p\{\w+\}|\\[sS]|[\[\]])", pattern):
        if part in ("[", "]"):
            in_brackets = part == "["
        elif part == r"\S":
            part = f"[^{_IN_ASCII[chr(92) + 's']}]"
        elif part.startswith(r"\p{") or part == r"\s":
            ranges = _IN_ASCII.get(part, "")
            part = ranges if in_brackets else f"[{ranges}]"
        parts.append(part)
    return "".join(parts)
