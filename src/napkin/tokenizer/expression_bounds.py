"""Bounds on regular expressions, which may come from a stranger's tokenizer file.

An expression of a few characters can take all of the time or memory: when it is compiled (repeats within repeats,
hundreds of thousands of alternatives) and when it is run (recursion, approximate matches, repeats of what matches in
many ways). The first is bounded by the size of the expression with its repeats written out; recursion and approximate
matches are refused; the time of a search has a limit. Expressions of real tokenizers stay far below all bounds.
"""

import re
from array import array

import regex

from napkin.errors import NapkinError

MAX_LENGTH = 2**14
MAX_SIZE = 2**14
"""The number of parts when each repeat is written out as often as it must or may be counted."""
MAX_ALTERNATIVES = 2**10
MAX_DEPTH = 100

SECONDS = 10.0
"""How long a search may take, in processor time, besides a second for each CHARACTERS_PER_SECOND."""
CHARACTERS_PER_SECOND = 100_000

# An escape, a class, a comment, the opening of a group, a repeat, and any other character.
_PART = re.compile(
    r"\\[pPN]\{[^}]*+\}|\\.|\[\^?\]?(?:\\.|\[:[^:\]]*+:\]|[^\]\\])*+\]|\(\?#[^)]*+\)|\(|\{[^{}]*+\}|.", re.DOTALL
)
# With these flags, white space, comments and brackets within brackets mean something else.
_OTHER_SYNTAX = re.compile(r"\(\?[a-zA-Z01-]*[xV]")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_APPROXIMATE = re.compile(r"\{[^}]*[eids<>=][^}]*\}")
_RECURSION = re.compile(r"\(\?(?:R\)|[+-]?\d|&|P>|P&)")


def compile_expression(pattern: str) -> "regex.Pattern[str]":
    """Compile an expression. Raises NapkinError if it is none, or beyond the bounds."""
    if obstacle := _obstacle(pattern):
        raise NapkinError(f"the pattern {shown(pattern)!r} {obstacle}: use a simpler one")
    return regex.compile(pattern)


def shown(pattern: str) -> str:
    """The beginning of a pattern, for a message."""
    return pattern if len(pattern) <= 100 else pattern[:100] + "…"


def piece_ends(expression: "regex.Pattern[str]", text: str) -> "array[int]":
    """Where the matches of an expression in `text`, and the pieces between them, end.

    Raises NapkinError if that takes too long.
    """
    # Of the text, the part up to the last end is divided, even if a pattern matches nothing, the empty string or
    # backwards. All ends are found before any is used: the limit also counts the time between two matches.
    ends, done = array("Q"), 0
    try:
        for match in expression.finditer(text, timeout=SECONDS + len(text) / CHARACTERS_PER_SECOND):
            start, end = match.span()
            if start > done:
                ends.append(done := start)
            if end > done:
                ends.append(done := end)
    except (TimeoutError, MemoryError) as error:
        what = "time" if isinstance(error, TimeoutError) else "memory"
        raise NapkinError(
            f"the pattern {shown(expression.pattern)!r} takes too much {what} on a text of {len(text)} characters: "
            "use one that matches in a single way"
        ) from None
    if done < len(text):
        ends.append(len(text))
    return ends


def _obstacle(pattern: str) -> str | None:
    """What is wrong with an expression; None if nothing is, or if it is none: the compiler says that better."""
    if len(pattern) > MAX_LENGTH:
        return f"has {len(pattern)} characters, more than {MAX_LENGTH}"
    if pattern.count("|") > MAX_ALTERNATIVES:
        return f"has more than {MAX_ALTERNATIVES} alternatives"
    # The size of each open group so far, and of the last part of each.
    sizes, last = [0], [0]
    for match in _PART.finditer(pattern):
        part = match.group()
        if part == "(":
            if _RECURSION.match(pattern, match.start()):
                return "calls itself or a part of itself, which is not supported"
            if flags := _OTHER_SYNTAX.match(pattern, match.start()):
                return f"sets a flag that is not supported ({flags.group()[2:]})"
            sizes.append(0)
            last.append(0)
            if len(sizes) > MAX_DEPTH:
                return f"nests groups more than {MAX_DEPTH} deep"
        elif part == ")":
            if len(sizes) > 1:
                last.pop()
                _add(sizes, last, sizes.pop() + 1)
        elif count := _COUNT.fullmatch(part):
            times = int((count[3] or count[1] or "1")[:9])
            sizes[-1] += last[-1] * (max(times, 1) - 1)
            last[-1] *= max(times, 1)
        elif _APPROXIMATE.fullmatch(part):
            return f"matches approximately ({part}), which is not supported"
        elif part not in "?*+|" and not part.startswith("(?#"):
            _add(sizes, last, 1)
        if sizes[-1] > MAX_SIZE:
            return f"has more than {MAX_SIZE} parts when its repeats are written out"
    return None


def _add(sizes: list[int], last: list[int], size: int) -> None:
    sizes[-1] += size
    last[-1] = size
