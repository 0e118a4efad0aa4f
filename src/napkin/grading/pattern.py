"""Regular expressions: the reference is one, which the whole answer must match."""

from functools import lru_cache
from typing import TYPE_CHECKING

from napkin.errors import NapkinError, NotJudged
from napkin.tokenizer.expression_bounds import compile_expression, shown

if TYPE_CHECKING:
    import regex

MOST_SECONDS = 1.0
"""Of a match: some expressions try exponentially many ways on a text that is made for it."""
MOST_CHARACTERS = 100_000
"""Of an answer; a longer one does not match."""


def regex_score(answer: str, reference: str) -> float:
    """1 if the answer, without white space at its ends, matches the expression from end to end.

    Raises NotJudged where that takes too long.
    """
    answer = answer.strip()
    if len(answer) > MOST_CHARACTERS:
        return 0.0
    try:
        return float(_compiled(reference).fullmatch(answer, timeout=MOST_SECONDS) is not None)
    except (TimeoutError, MemoryError):
        raise NotJudged(f"the pattern {shown(reference)!r} takes longer than {MOST_SECONDS:g} s") from None


def check_regex_reference(reference: str) -> None:
    """Raises NapkinError for what is not an expression, or beyond the bounds of what is compiled."""
    _compiled(reference)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    import regex

    try:
        return compile_expression(pattern)
    except (regex.error, RecursionError, MemoryError, OverflowError, KeyError, ValueError) as error:
        raise NapkinError(
            f"the reference {shown(pattern)!r} is not a regular expression ({error}): correct it"
        ) from None
