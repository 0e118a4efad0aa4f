"""The counts that rules of quality are made of: words, lines and paragraphs, and how much of a text is repeated.

A **word** is the longest run of characters that are not white space (Unicode's White_Space); an ideograph and a kana is
a word of its own. A **line** is what line feeds separate, without white space at its ends; lines without a word do not
count, and separate **paragraphs**. Lines, paragraphs and n-grams are equal if their words are. Lengths are in code
points. These functions are the specification, and what short texts run; `compiled/` is held to them.

The classes of a character are bits of one byte per code point of Unicode.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION, WHITE_SPACE, ranges

SPACE, LETTER, LOWER, SOLO, BULLET, TERMINAL, CLOSER, WATCHED = (1 << bit for bit in range(8))

TERMINALS = ".!?" + "‼‽⁇⁈⁉؟۔܀܁܂।॥၊။።፧፨᙮᠃᠉⸮。︒﹒﹖﹗！．？｡"
"""Characters that end a sentence: those of Unicode's property Sentence_Terminal in scripts of large corpora."""
CLOSERS = "\"')]}»”’›」』）】"
"""Characters that may stand between the end of a sentence and the white space after it."""
BULLETS = "-*•‣▪▸►▶●○■□◦⁃"
"""Characters that begin an item of a list."""
SOLO_RANGES = (
    (0x3040, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9D),
    (0x20000, 0x3FFFF),
)
"""Hiragana, katakana and ideographs: each character is a word, because these scripts do not separate words."""
# Characters that a compiled scan examines: ellipses, symbols, and a letter of each phrase of C4.
_WATCHED = ".#{…mMvVkK"


@cache
def character_classes() -> NDArray[np.uint8]:
    """The bits of every code point, of shape [1114112]; computed once per process."""
    classes = np.zeros(0x110000, np.uint8)
    for first, last, category in ranges(DEFAULT_VERSION):
        if category.startswith("L"):
            classes[first : last + 1] |= LETTER | (LOWER if category == "Ll" else 0)
    for first, last in SOLO_RANGES:
        classes[first : last + 1] |= SOLO
    for characters, bit in (
        (WHITE_SPACE, SPACE),
        (TERMINALS, TERMINAL),
        (CLOSERS, CLOSER),
        (BULLETS, BULLET),
        (_WATCHED, WATCHED),
    ):
        classes[[ord(each) for each in characters]] |= bit
    return classes


STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
"""Rae et al. 2021, A1.1; at most 8 ASCII letters each."""
TOP_N_GRAMS = (2, 3, 4)
REPEATED_N_GRAMS = (5, 6, 7, 8, 9, 10)
SHORT_LINE = 30
"""Characters below which a line is short (Penedo et al. 2024, 3.6)."""

_SOLO = "".join(f"{chr(first)}-{chr(last)}" for first, last in SOLO_RANGES)
WORD = re.compile(f"[{_SOLO}]|[^{re.escape(WHITE_SPACE)}{_SOLO}]+")
"""A word."""
_ASCII_PUNCTUATION = "".join(chr(i) for i in range(128) if not chr(i).isalnum())


@dataclass(slots=True)
class TextStatistics:
    """Counts of one text; those of repetition are 0 if they were not requested."""

    characters: int = 0
    words: int = 0
    word_characters: int = 0
    alphabetic_words: int = 0
    """Words with a letter."""
    stop_words: int = 0
    """Different ones of STOP_WORDS, in any case and with punctuation around them."""
    hashes: int = 0
    ellipses: int = 0
    """Three full stops in a row, not overlapping, or U+2026."""
    line_feeds: int = 0
    lines: int = 0
    line_characters: int = 0
    bullet_lines: int = 0
    ellipsis_lines: int = 0
    terminated_lines: int = 0
    """Lines that end in a character that ends sentences."""
    short_lines: int = 0
    paragraphs: int = 0
    repeated_lines: int = 0
    """Lines that occurred earlier in the text."""
    repeated_line_characters: int = 0
    repeated_paragraphs: int = 0
    repeated_paragraph_characters: int = 0
    """Characters of the lines in those paragraphs."""
    top_n_gram_characters: dict[int, int] = field(default_factory=dict)
    """For each n, the length of the n-gram that occurs most often (the first of those), with spaces between words,
    times its occurrences; 0 if none occurs twice."""
    repeated_n_gram_characters: dict[int, int] = field(default_factory=dict)
    """For each n, the characters of words in n-grams that occurred earlier in the text; each counts once."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line with at least one word."""

    text: str
    words: tuple[str, ...]
    begins_paragraph: bool


Repetition = Literal["all", "lines", "none"]
"""Choice of the counts of repetition; those of lines alone are cheap."""


def plain_statistics(text: str, *, repetition: Repetition = "all") -> TextStatistics:
    """All counts of a text; of repetition, only those that are requested."""
    lines = list(lines_of(text))
    words = [word for line in lines for word in line.words]
    endings = [line.text.endswith(("...", "…")) for line in lines]
    statistics = TextStatistics(
        characters=len(text),
        words=len(words),
        word_characters=sum(map(len, words)),
        alphabetic_words=sum(any(has(each, LETTER) for each in word) for word in words),
        stop_words=len({word.strip(_ASCII_PUNCTUATION).lower() for word in words if word.isascii()} & {*STOP_WORDS}),
        hashes=text.count("#"),
        ellipses=text.count("...") + text.count("…"),
        line_feeds=text.count("\n"),
        lines=len(lines),
        line_characters=sum(len(line.text) for line in lines),
        bullet_lines=sum(line.text.startswith(tuple(BULLETS)) for line in lines),
        ellipsis_lines=sum(endings),
        terminated_lines=sum(line.text.endswith(tuple(TERMINALS)) for line in lines),
        short_lines=sum(len(line.text) < SHORT_LINE for line in lines),
        paragraphs=sum(line.begins_paragraph for line in lines),
    )
    lengths = [len(line.text) for line in lines]
    if repetition != "none":
        found = _repeated([line.words for line in lines], lengths)
        statistics.repeated_lines, statistics.repeated_line_characters = found
    if repetition == "all":
        _count_repetition(statistics, lines, lengths, words)
    return statistics


def lines_of(text: str) -> Iterator[Line]:
    """The lines with at least one word, in order."""
    begins = True
    for piece in text.split("\n"):
        line = piece.strip(WHITE_SPACE)
        if line:
            yield Line(line, words_of(line), begins)
        begins = not line


def words_of(text: str) -> tuple[str, ...]:
    return tuple(WORD.findall(text))


def count_sentences(line: Line) -> int:
    """Sentences of a line: one, and one more per word that ends one and is followed by no lower-case letter."""
    ends = [word.rstrip(CLOSERS)[-1:] in {*TERMINALS} for word in line.words[:-1]]
    return 1 + sum(ended and not has(word[0], LOWER) for ended, word in zip(ends, line.words[1:], strict=True))


def has(character: str, bit: int) -> bool:
    return bool(character_classes()[ord(character)] & bit)


def _count_repetition(
    statistics: TextStatistics, lines: Sequence[Line], lengths: Sequence[int], words: Sequence[str]
) -> None:
    paragraphs: list[list[str]] = []
    sizes: list[int] = []
    for line, length in zip(lines, lengths, strict=True):
        if line.begins_paragraph:
            paragraphs.append([])
            sizes.append(0)
        paragraphs[-1] += line.words
        sizes[-1] += length
    counts = _repeated([tuple(each) for each in paragraphs], sizes)
    statistics.repeated_paragraphs, statistics.repeated_paragraph_characters = counts
    for n in TOP_N_GRAMS:
        found = Counter(zip(*(words[i:] for i in range(n)), strict=False)).most_common(1)
        gram, count = found[0] if found else ((), 0)
        statistics.top_n_gram_characters[n] = (sum(map(len, gram)) + n - 1) * count if count > 1 else 0
    for n in REPEATED_N_GRAMS:
        seen: set[tuple[str, ...]] = set()
        covered: set[int] = set()
        for i, gram in enumerate(zip(*(words[i:] for i in range(n)), strict=False)):
            if gram in seen:
                covered.update(range(i, i + n))
            seen.add(gram)
        statistics.repeated_n_gram_characters[n] = sum(len(words[i]) for i in covered)


def _repeated(keys: Sequence[Hashable], lengths: Sequence[int]) -> tuple[int, int]:
    """The number of keys that stood in the sequence before, and the sum of their lengths."""
    seen: set[Hashable] = set()
    count = characters = 0
    for key, length in zip(keys, lengths, strict=True):
        if key in seen:
            count += 1
            characters += length
        seen.add(key)
    return count, characters
