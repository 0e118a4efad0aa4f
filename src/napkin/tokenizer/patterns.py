"""How text is cut into pre-tokens, the pieces within which byte pairs may merge.

A pattern is a regular expression of the `regex` library; its matches are the pre-tokens. What lies between
two matches is kept as a pre-token of its own, so that no pattern can lose text.
"""

import operator
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
    # No pre-tokenization: merges may cross words and lines.
    "whole": r"(?s:.+)",
}


class PreTokenizer:
    """Cuts text by a pattern: the name of one of PATTERNS, or any other regular expression.

    Raises NapkinError if it is neither.
    """

    def __init__(self, pattern: str) -> None:
        self._may_leave_gaps = pattern not in PATTERNS
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
