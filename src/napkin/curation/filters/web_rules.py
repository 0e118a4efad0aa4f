"""The rules of Gopher, C4, FineWeb and RefinedWeb, as stages.

Gopher's are those of MassiveText (Rae et al. 2021, arXiv:2112.11446, appendix A.1.1, table A1). The paper leaves open
what a word is: here the longest run of characters without white space (`text_counts.py`), so that `the,` is one word,
which counts as the stop word `the`. datatrove separates punctuation from words, leaves words of punctuation out of the
number and the mean length, and counts them in the fraction of words with a letter.

C4 (Raffel et al. 2020, JMLR 21(140), section 2.2) drops lines that are not sentences, and documents by what those
reveal. As in the code that made C4 (tensorflow_datasets, c4_utils.py): a line is judged by the first reason that holds,
lorem ipsum and curly brackets are searched for in lines that end sentences. The list of bad words is the stage
`word-list`. Ours are: what a sentence is (`count_sentences`), and that case is folded in ASCII only.

FineWeb adds three rules with their thresholds (Penedo et al. 2024, arXiv:2406.17557, section 3.6). The code that made
the dataset (datatrove's `FineWebQualityFilter`) differs from the paper in two of them: it drops a document with 1% of
its characters in repeated lines where the paper says 10%, and one with more than 0.3 line feeds per word: the paper has
no such rule.

RefinedWeb corrects lines (Penedo et al. 2023, arXiv:2306.01116, section 3.2 and appendix G.2). The paper names the
kinds of lines and gives examples; the lists of words are ours: extraction leaves counters of social networks, buttons
and menus, each on a line of its own.
"""

import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from napkin.curation.stage import Dropped, Record, TraceEntry
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.curation.filters.document_counts import C4Lines
    from napkin.curation.filters.text_counts import TextStatistics


Comparison = tuple[str, float, str, float]
"""The name of a rule, the value of the text, the comparison for which the text is dropped, and the threshold."""

FAILS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
"""Whether a value fails a comparison with a threshold."""


class RuleStage:
    """A stage that drops a text for which a comparison of its counts holds; the first one is the reason."""

    fractions: ClassVar[Sequence[str]] = ()
    """Options that are numbers from 0 to 1."""
    counts: ClassVar[Sequence[str]] = ()
    """Options that are not negative."""

    def __post_init__(self) -> None:
        check_fractions(self, *self.fractions)
        check_counts(self, *self.counts)

    def comparisons(self, counts: Any) -> Iterable[Comparison]:
        """Each rule, in the order of its paper, with the value of a text and the threshold."""
        raise NotImplementedError

    def counted(self, text: str) -> Any:
        """The counts of a text that the rules look at."""
        from napkin.curation.filters.document_counts import text_statistics

        return text_statistics(text)

    def apply(self, record: Record) -> Record | Dropped:
        return first_failure(self.comparisons(self.counted(record.text))) or record

    def failing_rules(self, text: str) -> list[str]:
        """The names of all rules that would drop a text."""
        return [
            rule for rule, value, how, threshold in self.comparisons(self.counted(text)) if FAILS[how](value, threshold)
        ]


def first_failure(comparisons: Iterable[Comparison]) -> Dropped | None:
    """The first failed rule, as a reason to drop the text."""
    for rule, value, comparison, threshold in comparisons:
        if FAILS[comparison](value, threshold):
            return Dropped(rule, f"{value:.4g} {comparison} {threshold:.4g}")
    return None


def share(part: float, whole: float) -> float:
    """part / whole; 0 for nothing of nothing."""
    return part / whole if whole else 0.0


def check_fractions(stage: object, *options: str) -> None:
    """Raise NapkinError for the first of these options of a stage that is not between 0 and 1."""
    for name, value in _values(stage, options):
        if not 0 <= value <= 1:
            raise NapkinError(f"{name} is {value}: use a fraction from 0 to 1")


def check_counts(stage: object, *options: str) -> None:
    """Raise NapkinError for the first of these options of a stage that is negative or not a number."""
    for name, value in _values(stage, options):
        if not value >= 0:
            raise NapkinError(f"{name} is {value}: use 0 or more")


def _values(stage: object, options: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Names and numbers of options: each of several; none of an option that is None."""
    for name in options:
        value = getattr(stage, name)
        yield from ((name, each) for each in (value if isinstance(value, tuple) else (value,)) if each is not None)


@dataclass(frozen=True)
class Gopher(RuleStage):
    """Drop documents that are not prose by Gopher's rules of quality: length, symbols, lists, letters, stop words."""

    name: ClassVar[str] = "gopher"
    fractions = "max_bullet_lines max_ellipsis_lines min_alphabetic_words".split()
    counts = "min_words max_words min_mean_word_length max_mean_word_length max_symbols min_stop_words".split()

    min_words: int = 50
    """Words that a document has at least."""
    max_words: int = 100_000
    """Words that a document has at most."""
    min_mean_word_length: float = 3.0
    """Mean number of characters of a word, at least."""
    max_mean_word_length: float = 10.0
    """Mean number of characters of a word, at most."""
    max_symbols: float = 0.1
    """Hash signs per word at most, and ellipses per word at most."""
    max_bullet_lines: float = 0.9
    """Fraction of lines that begin with a bullet point, at most."""
    max_ellipsis_lines: float = 0.3
    """Fraction of lines that end in an ellipsis, at most."""
    min_alphabetic_words: float = 0.8
    """Fraction of words with a letter, at least."""
    min_stop_words: int = 2
    """The fewest of the words the, be, to, of, and, that, have, with that a document must contain; 0 for other
    languages."""

    def counted(self, text: str) -> "TextStatistics":
        from napkin.curation.filters.document_counts import text_statistics

        return text_statistics(text, repetition="none")

    def comparisons(self, counts: "TextStatistics") -> Iterator[Comparison]:
        words, lines = counts.words, counts.lines
        mean_length = share(counts.word_characters, words)
        yield "too few words", words, "<", self.min_words
        yield "too many words", words, ">", self.max_words
        yield "short words", mean_length, "<", self.min_mean_word_length
        yield "long words", mean_length, ">", self.max_mean_word_length
        yield "hash signs", share(counts.hashes, words), ">", self.max_symbols
        yield "ellipses", share(counts.ellipses, words), ">", self.max_symbols
        yield "bullet points", share(counts.bullet_lines, lines), ">", self.max_bullet_lines
        yield "lines end in ellipses", share(counts.ellipsis_lines, lines), ">", self.max_ellipsis_lines
        yield "words without letters", share(counts.alphabetic_words, words), "<", self.min_alphabetic_words
        yield "few stop words", counts.stop_words, "<", self.min_stop_words


@dataclass(frozen=True)
class GopherRepetition(RuleStage):
    """Drop documents that repeat themselves by Gopher's rules: lines, paragraphs, short and long n-grams of words.

    Fractions of characters are of all characters of the text. An n-gram's second and later occurrences are duplicates;
    a character in several of them counts once. datatrove continues n words after a duplicate, which leaves characters
    out; but its words are shorter, since punctuation is separated, so n of them are repeated more often.
    """

    name: ClassVar[str] = "gopher-repetition"
    fractions = (
        "max_repeated_lines max_repeated_paragraphs max_repeated_line_characters max_repeated_paragraph_characters"
        " max_top_n_gram_characters max_repeated_n_gram_characters"
    ).split()

    max_repeated_lines: float = 0.3
    """The largest fraction of lines that occurred earlier in the document."""
    max_repeated_paragraphs: float = 0.3
    """The largest fraction of paragraphs that occurred earlier in the document."""
    max_repeated_line_characters: float = 0.2
    """The largest fraction of characters in lines that occurred earlier in the document."""
    max_repeated_paragraph_characters: float = 0.2
    """The largest fraction of characters in paragraphs that occurred earlier in the document."""
    max_top_n_gram_characters: tuple[float, float, float] = (0.2, 0.18, 0.16)
    """Fraction of characters in the most frequent n-gram of 2, 3 and 4 words, at most."""
    max_repeated_n_gram_characters: tuple[float, float, float, float, float, float] = (
        *(0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
    )
    """Fraction of characters in duplicate n-grams of 5 to 10 words, at most."""

    def comparisons(self, counts: "TextStatistics") -> Iterator[Comparison]:
        all_characters = counts.characters
        yield "repeated lines", share(counts.repeated_lines, counts.lines), ">", self.max_repeated_lines
        repeated = share(counts.repeated_paragraphs, counts.paragraphs)
        yield "repeated paragraphs", repeated, ">", self.max_repeated_paragraphs
        characters = share(counts.repeated_line_characters, all_characters)
        yield "characters of repeated lines", characters, ">", self.max_repeated_line_characters
        characters = share(counts.repeated_paragraph_characters, all_characters)
        yield "characters of repeated paragraphs", characters, ">", self.max_repeated_paragraph_characters
        tops = counts.top_n_gram_characters.items()
        for (n, characters), threshold in zip(tops, self.max_top_n_gram_characters, strict=True):
            yield f"most frequent {n}-gram", share(characters, all_characters), ">", threshold
        repetitions = counts.repeated_n_gram_characters.items()
        for (n, characters), threshold in zip(repetitions, self.max_repeated_n_gram_characters, strict=True):
            yield f"duplicate {n}-grams", share(characters, all_characters), ">", threshold


@dataclass(frozen=True)
class C4(RuleStage):
    """Keep only lines that end a sentence, and drop documents with too few of them, by the rules of C4.

    Removed are lines without a full stop, question mark, exclamation mark or quotation mark at their end, with few
    words or a very long one, about JavaScript or on cookies and terms of use. Those that stay are separated by line
    feeds.
    """

    name: ClassVar[str] = "c4"
    counts = "min_sentences min_line_words max_word_characters".split()

    min_sentences: int = 5
    """Sentences that the lines of a document have at least, once lines were removed."""
    min_line_words: int = 3
    """Words that a line has at least."""
    max_word_characters: int = 1000
    """Characters that a word of a line has at most (c4_utils.py, not in the paper)."""
    lorem_ipsum: bool = True
    """Drop documents with the words lorem ipsum."""
    curly_bracket: bool = True
    """Drop documents with a curly bracket, which stands in programs; false for corpora with code."""

    def counted(self, text: str) -> "C4Lines":
        from napkin.curation.filters.document_counts import c4_lines

        return c4_lines(text, self.min_line_words, self.max_word_characters)

    def apply(self, record: Record) -> Record | Dropped:
        counts = self.counted(record.text)
        dropped = first_failure(self.comparisons(counts))
        if dropped is not None:
            return dropped
        record.text = counts.text
        removed = ", ".join(f"{reason}: {count}" for reason, count in counts.removed.items() if count)
        record.trace.append(TraceEntry(self.name, f"lines removed: {removed}" if removed else ""))
        return record

    def comparisons(self, counts: "C4Lines") -> Iterator[Comparison]:
        if self.lorem_ipsum:
            yield "lorem ipsum", counts.lorem_ipsum, ">", 0
        if self.curly_bracket:
            yield "curly bracket", counts.curly_bracket, ">", 0
        yield "too few sentences", counts.sentences, "<", self.min_sentences


@dataclass(frozen=True)
class FineWeb(RuleStage):
    """Drop lists and menus by FineWeb's rules: lines without full stops, lines said twice, short lines.

    Rules and thresholds are the paper's, which were chosen by models trained with and without each. The code that made
    the dataset has two others: max_repeated_line_characters 0.01 and max_line_feeds_per_word 0.3.
    """

    name: ClassVar[str] = "fineweb"
    fractions = "min_terminated_lines max_repeated_line_characters max_short_lines".split()
    counts = ("max_line_feeds_per_word",)

    min_terminated_lines: float = 0.12
    """A document is dropped if at most this fraction of its lines ends with a mark that ends sentences."""
    max_repeated_line_characters: float = 0.1
    """A document is dropped if at least this fraction of its lines' characters is in lines that stood in it before;
    0.1 is the paper's, 0.01 that of the dataset's code."""
    max_short_lines: float = 0.67
    """A document is dropped if at least this fraction of its lines has fewer than 30 characters."""
    max_line_feeds_per_word: float | None = None
    """A document is dropped if it has more line feeds per word; None is the paper, which has no such rule, 0.3 the
    dataset's code (`list_ratio`)."""

    def counted(self, text: str) -> "TextStatistics":
        from napkin.curation.filters.document_counts import text_statistics

        return text_statistics(text, repetition="lines")

    def comparisons(self, counts: "TextStatistics") -> Iterator[Comparison]:
        terminated = share(counts.terminated_lines, counts.lines)
        yield "lines without punctuation", terminated, "<=", self.min_terminated_lines
        repeated = share(counts.repeated_line_characters, counts.line_characters)
        yield "characters of repeated lines", repeated, ">=", self.max_repeated_line_characters
        yield "short lines", share(counts.short_lines, counts.lines), ">=", self.max_short_lines
        if self.max_line_feeds_per_word is not None:
            line_feeds = share(counts.line_feeds, counts.words)
            yield "line feeds per word", line_feeds, ">", self.max_line_feeds_per_word


_COUNTER = re.compile(
    r"\W*[0-9][0-9.,]{0,15} ?[KkMm]?\s{1,3}"
    r"(?:likes?|shares?|comments?|views?|followers?|following|retweets?|reposts?|replies|reply|votes?|upvotes?|downloads?"
    r"|subscribers?|reactions?|plays?|posts?|reviews?|ratings?|points?|bookmarks?|quotes?)\W*",
    re.IGNORECASE,
)
_MAX_COUNTER = 60
"""Characters of a line that may be a counter."""
_MAX_EDITED_WORDS = 10
_BEGINNING = re.compile(r"(?:sign[ -]?in|log[ -]?in|sign[ -]?up|skip to (?:main )?content)\b", re.IGNORECASE)
_END = re.compile(r"(?:read more|continue reading|show more|see more|learn more)\s?(?:\.\.\.|…)?$", re.IGNORECASE)
_ANYWHERE = re.compile(r"items? in (?:your )?cart|add to cart|share this|all rights reserved", re.IGNORECASE)


def line_defect(line: str, max_upper: float = 0.5) -> str:
    """Why a line, with no white space at its ends, is none of prose; nothing if it may be."""
    # Punctuation is neither: a line `3.14 | 2.72` is numbers only.
    letters = sum(map(str.isalpha, line))
    if letters == 0 and any(map(str.isdecimal, line)):
        return "numbers only"
    if len(line) <= _MAX_COUNTER and _COUNTER.fullmatch(line):
        return "counter"
    words = line.split(maxsplit=_MAX_EDITED_WORDS)
    if len(words) == 1:
        return "one word"
    if letters and sum(map(str.isupper, line)) > max_upper * letters:
        return "upper case"
    if len(words) <= _MAX_EDITED_WORDS and (_BEGINNING.match(line) or _END.search(line) or _ANYWHERE.search(line)):
        return "button or menu"
    return ""


@dataclass(frozen=True)
class RefinedWeb:
    """Remove lines of menus, counters and headings by RefinedWeb's rules; drop documents with many of them.

    Removed are lines of mainly capitals, of numbers only, counters (3 likes), single words, and short lines that are
    buttons or menus. In the paper a document is dropped when the lines hold more than 5% of its words.
    """

    name: ClassVar[str] = "refinedweb"

    max_removed_words: float = 0.05
    """Fraction of a document's words in lines to be removed, at most; 1 removes lines and never drops."""
    max_upper: float = 0.5
    """Fraction of a line's letters that are capitals, at most."""

    def __post_init__(self) -> None:
        check_fractions(self, "max_removed_words", "max_upper")

    def apply(self, record: Record) -> Record | Dropped:
        kept: list[str] = []
        removed: Counter[str] = Counter()
        words = removed_words = 0
        for line in record.text.split("\n"):
            stripped = line.strip()
            defect = line_defect(stripped, self.max_upper) if stripped else ""
            n = len(stripped.split())
            words += n
            if defect:
                removed[defect] += 1
                removed_words += n
            else:
                kept.append(line)
        fraction = share(removed_words, words)
        if fraction > self.max_removed_words:
            return Dropped("words in removed lines", f"{fraction:.4g} > {self.max_removed_words:.4g}")
        if removed:
            record.text = "\n".join(kept)
        description = ", ".join(f"{defect}: {count}" for defect, count in sorted(removed.items()))
        record.trace.append(TraceEntry(self.name, f"lines removed: {description}" if description else ""))
        return record
