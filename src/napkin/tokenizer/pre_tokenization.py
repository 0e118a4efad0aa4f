"""Pre-tokenization: splitting text into the pieces within which byte pairs may merge.

A pattern is a regular expression of the `regex` library; its matches are the pre-tokens. Text between two matches is a
pre-token too, so no pattern can lose text. Several patterns in a row, with `(?then)` between them, split the pieces of
one by the next, as in DeepSeek V3: numbers first, then Chinese and Japanese, then words.

Bounds on regular expressions, which may come from a stranger's tokenizer file.

An expression of a few characters can take all of the time or memory: when it is compiled (repeats within repeats,
hundreds of thousands of alternatives) and when it is run (recursion, approximate matches, repeats of what matches in
many ways). The first is bounded by the size of the expression with its repeats written out; recursion and approximate
matches are refused; the time of a search has a limit. Expressions of real tokenizers stay far below all bounds.
"""

import operator
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain

import regex

from napkin.errors import NapkinError
from napkin.tokenizer.text_input import check_texts, split_at, utf8
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION, check_version, stand_ins

MAX_LENGTH = 2**14
MAX_SIZE = 2**14
"""The number of parts when each repeat is written out as often as it must or may be counted."""
MAX_ALTERNATIVES = 2**10
MAX_DEPTH = 100

SECONDS = 10.0
"""The longest that a search may take, in processor time, besides a second for each CHARACTERS_PER_SECOND."""
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
    """The places where the matches of an expression in `text`, and the pieces between them, end.

    Raises NapkinError if that takes too long.
    """
    # Only the part of the text up to the last end is divided, even if a pattern matches nothing, the empty string or
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
    """The reason why an expression cannot be used; None if there is none, or if it is no expression: the compiler says
    that better."""
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


Progress = Callable[[str, int, int], None]
"""Called with the stage of training, how many texts or merges are done, and of how many (0 if unknown)."""

# Where the originals repeat greedily at the end of an alternative, these repeat possessively: the same matches without
# backtracking.
PATTERNS: dict[str, str] = {
    # GPT-2 (Radford et al. 2019): English contractions; a word, a number or a run of symbols, each with one space
    # before it; white space, except for the last space, which belongs to the following word.
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s",
    # GPT-4 as first published, Llama 3: contractions in any case, a word with any one symbol before it, numbers of at
    # most three digits, line ends together with the symbols or white space before them.
    "gpt4": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    # GPT-4 in tiktoken's current form: white space at the end of a text is one pre-token, including line ends.
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++\Z|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    # Qwen 2 and 3: as GPT-4 at first, with each digit alone.
    "qwen2": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    # GPT-4o: a word may begin with capitals, ends where lower case is followed by a capital, and includes its
    # contraction; combining marks are letters; symbols include following line ends and slashes.
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]++(?i:'(?:[sdmt]|ll|ve|re))?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]++[\p{Ll}\p{Lm}\p{Lo}\p{M}]*+(?i:'(?:[sdmt]|ll|ve|re))?"
        r"|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n/]*+|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    # No pre-tokenization: merges may cross words and lines.
    "whole": r"(?s:.+)",
}

THEN = "(?then)"
"""Between patterns in a row. No regular expression has it: there, `(?` is followed by what is known."""
_IN_A_ROW = re.compile(r"(?<!\\)\(\?then\)")

_MAX_RE_LENGTH = 2**14
_REPORT_EVERY_CHARACTERS = 2**20


class PreTokenizer:
    r"""Splits text by a pattern: a name in PATTERNS, any other regular expression, or several of them in a row.

    Its character classes are those of `unicode_version`, whichever the installed `regex` has; other properties, such as
    scripts, and `\w` are the library's. Raises NapkinError if it is neither, beyond the bounds
    below, or if there is no table of that version.
    """

    def __init__(self, pattern: str, unicode_version: str = DEFAULT_VERSION) -> None:
        check_version(unicode_version)
        self._unicode_version = unicode_version
        pattern, *following = patterns_in_a_row(pattern)
        self._following = [PreTokenizer(each, unicode_version) for each in following]
        self._may_leave_gaps = pattern not in PATTERNS
        self._find_in_ascii = None if self._may_leave_gaps else re.compile(in_ascii(PATTERNS[pattern])).findall
        try:
            self._compiled = compile_expression(pattern) if self._may_leave_gaps else regex.compile(PATTERNS[pattern])
        except (regex.error, RecursionError, MemoryError, OverflowError, KeyError, ValueError) as error:
            raise NapkinError(
                f"{shown(pattern)!r} is not a regular expression ({error}): use one, or one of {', '.join(PATTERNS)}"
            ) from error

    def split(self, text: str) -> Iterator[str]:
        """Yield the pre-tokens of `text` in order; their concatenation is `text`.

        >>> list(PreTokenizer("gpt2").split("it's  42 cats!"))
        ['it', "'s", ' ', ' 42', ' cats', '!']
        >>> list(PreTokenizer("[0-9]+").split("a1b22"))
        ['a', '1', 'b', '22']
        >>> list(PreTokenizer("[0-9](?then)gpt2").split("it's 42"))
        ['it', "'s", ' ', '4', '2']
        """
        pieces = self._split_once(text)
        for each in self._following:
            pieces = chain.from_iterable(map(each.split, pieces))
        return pieces

    def _split_once(self, text: str) -> Iterator[str]:
        if self._may_leave_gaps:
            return self._matches_and_gaps(text)
        # On ASCII, `re` is three times as fast as `regex`; for a short text, a list is faster than an iterator.
        if len(text) <= _MAX_RE_LENGTH and text.isascii() and self._find_in_ascii:
            return iter(self._find_in_ascii(text))
        seen = self._as_seen(text)
        if seen is text:
            return map(operator.itemgetter(0), self._compiled.finditer(text))
        return (text[match.start() : match.end()] for match in self._compiled.finditer(seen))

    def _as_seen(self, text: str) -> str:
        """The text with other characters of the right category where the library has another."""
        if text.isascii():
            return text
        found = stand_ins(self._unicode_version)
        return text if found is None else found.apply(text)

    def _matches_and_gaps(self, text: str) -> Iterator[str]:
        start = 0
        for end in piece_ends(self._compiled, self._as_seen(text)):
            yield text[start:end]
            start = end


def patterns_in_a_row(pattern: str) -> list[str]:
    """The patterns of which the first splits a text and each other one the pieces of the one before it."""
    return _IN_A_ROW.split(pattern)


def count_pre_tokens(
    texts: Iterable[str],
    special_tokens: Sequence[str],
    pattern: str,
    progress: Progress,
    unicode_version: str = DEFAULT_VERSION,
) -> Counter[str]:
    """The number of times that each pre-token occurs between the special tokens of all texts."""
    pre_tokenizer = PreTokenizer(pattern, unicode_version)
    counts: Counter[str] = Counter()
    total = len(texts) if isinstance(texts, Sized) else 0
    done = unreported = 0
    for done, text in enumerate(check_texts(texts), start=1):
        utf8(text, f"text {done - 1}")
        for ordinary in split_at(text, special_tokens)[::2]:
            counts.update(pre_tokenizer.split(ordinary))
        unreported += len(text)
        if unreported >= _REPORT_EVERY_CHARACTERS:
            progress("counting", done, total)
            unreported = 0
    progress("counting", done, done)
    return counts


# The ASCII characters of the Unicode classes in the patterns, as ranges; all other classes have none.
_IN_ASCII = {r"\p{L}": "A-Za-z", r"\p{Lu}": "A-Z", r"\p{Ll}": "a-z", r"\p{N}": "0-9", r"\s": r"\t-\r "}


def in_ascii(pattern: str) -> str:
    r"""The same pattern without Unicode properties, for text that is all ASCII.

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
