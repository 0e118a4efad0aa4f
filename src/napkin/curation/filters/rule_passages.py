"""The passages of a text that a rule of quality counts: what a reader looks at to see why a document was dropped.

Words, lines and paragraphs are those of `text_counts.py`. A rule that counts a text as a whole, such as its length, has
none.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from napkin.curation.filters.personal_data import TOKENS
from napkin.curation.filters.text_counts import BULLETS, LETTER, SHORT_LINE, TERMINALS, WORD, has
from napkin.curation.filters.web_rules import line_defect
from napkin.tokenizer.unicode_tables.tables import WHITE_SPACE

_Item = TypeVar("_Item")
Passage = tuple[int, int]
"""The first character, and the one behind the last."""
_TOP = re.compile(r"most frequent ([0-9]+)-gram")
_DUPLICATE = re.compile(r"duplicate ([0-9]+)-grams")
_MASKS = re.compile("|".join(map(re.escape, TOKENS.values())))
_LISTED = re.compile(r"words of ")


@dataclass(frozen=True)
class _PlacedLine:
    """A line with at least one word, and where it stands."""

    begin: int
    text: str
    words: tuple[str, ...]
    begins_paragraph: bool

    @property
    def passage(self) -> Passage:
        return self.begin, self.begin + len(self.text)


def passages_of(rule: str, detail: str, text: str) -> list[Passage]:
    """The passages of a text that a rule counted, in order and without overlaps; empty for a rule that has no passages.
    Without a rule, what was masked in a document that remained."""
    if not rule:
        return _matches(_MASKS, text)
    if rule in _OF_LINES:
        return [line.passage for line in _lines(text) if _OF_LINES[rule](line)]
    if rule in ("repeated lines", "characters of repeated lines"):
        return [line.passage for line in _repeated(_lines(text), lambda line: line.words)]
    if rule in ("repeated paragraphs", "characters of repeated paragraphs"):
        repeated = _repeated(_paragraphs(text), lambda lines: tuple(word for line in lines for word in line.words))
        return [line.passage for lines in repeated for line in lines]
    if rule in _PATTERNS:
        return _matches(_PATTERNS[rule], text)
    if rule == "words without letters":
        return [found.span() for found in WORD.finditer(text) if not any(has(each, LETTER) for each in found[0])]
    if found := _TOP.fullmatch(rule):
        return _top_n_gram(text, int(found[1]))
    if found := _DUPLICATE.fullmatch(rule):
        return _duplicate_n_grams(text, int(found[1]))
    if _LISTED.match(rule):
        listed = "|".join(re.escape(each) for each in sorted(detail.split(", "), key=len, reverse=True) if each)
        return _matches(re.compile(rf"(?<!\w)(?:{listed})(?!\w)", re.IGNORECASE), text) if listed else []
    return []


_PATTERNS = {
    "hash signs": re.compile("#+"),
    "ellipses": re.compile(r"\.\.\.|…"),
    "lorem ipsum": re.compile("lorem ipsum", re.IGNORECASE),
    "curly bracket": re.compile("{"),
}
_OF_LINES: dict[str, Callable[[_PlacedLine], bool]] = {
    "bullet points": lambda line: line.text.startswith(tuple(BULLETS)),
    "lines end in ellipses": lambda line: line.text.endswith(("...", "…")),
    "lines without punctuation": lambda line: not line.text.endswith(tuple(TERMINALS)),
    "short lines": lambda line: len(line.text) < SHORT_LINE,
    "words in removed lines": lambda line: bool(line_defect(line.text)),
}
"""Rules that count lines, and which lines."""


def _lines(text: str) -> Iterator[_PlacedLine]:
    place, begins = 0, True
    for piece in text.split("\n"):
        line = piece.strip(WHITE_SPACE)
        if line:
            at = place + len(piece) - len(piece.lstrip(WHITE_SPACE))
            yield _PlacedLine(at, line, tuple(WORD.findall(line)), begins)
        begins = not line
        place += len(piece) + 1


def _paragraphs(text: str) -> Iterator[list[_PlacedLine]]:
    paragraph: list[_PlacedLine] = []
    for line in _lines(text):
        if line.begins_paragraph and paragraph:
            yield paragraph
            paragraph = []
        paragraph.append(line)
    if paragraph:
        yield paragraph


def _repeated(items: Iterable[_Item], key: Callable[[_Item], tuple[str, ...]]) -> Iterator[_Item]:
    seen: set[tuple[str, ...]] = set()
    for item in items:
        if key(item) in seen:
            yield item
        seen.add(key(item))


def _matches(pattern: re.Pattern[str], text: str) -> list[Passage]:
    return [match.span() for match in pattern.finditer(text)]


def _n_grams(text: str, n: int) -> tuple[list[Passage], list[tuple[str, ...]]]:
    """The places of all words, and the n-grams that begin at each."""
    found = [*WORD.finditer(text)]
    words = [each[0] for each in found]
    return [each.span() for each in found], [*zip(*(words[i:] for i in range(n)), strict=False)]


def _top_n_gram(text: str, n: int) -> list[Passage]:
    places, grams = _n_grams(text, n)
    top = Counter(grams).most_common(1)
    if not top or top[0][1] < 2:
        return []
    return _joined((places[i][0], places[i + n - 1][1]) for i, gram in enumerate(grams) if gram == top[0][0])


def _duplicate_n_grams(text: str, n: int) -> list[Passage]:
    places, grams = _n_grams(text, n)
    repeated = _repeated(enumerate(grams), lambda each: each[1])
    return _joined((places[i][0], places[i + n - 1][1]) for i, _ in repeated)


def _joined(passages: Iterable[Passage]) -> list[Passage]:
    """Passages in order, those that touch each other as one."""
    found: list[Passage] = []
    for begin, end in passages:
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
