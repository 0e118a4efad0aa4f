"""The rules of MassiveText, on which Gopher was trained (Rae et al. 2021, arXiv:2112.11446, appendix A.1.1, table A1).

The paper leaves open what a word is: here the longest run of characters without white space (`text_counts.py`), so
that `the,` is one word, which counts as the stop word `the`. datatrove separates punctuation from words, leaves words
of punctuation out of the number and the mean length, and counts them in the fraction of words with a letter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from napkin.curation.filters.web_rules import Comparison, check_counts, check_fractions, failures, first_failure, share
from napkin.curation.stage import Dropped, Record

if TYPE_CHECKING:
    from napkin.curation.filters.text_counts import TextStatistics


@dataclass(frozen=True)
class Gopher:
    """Drop documents that are not prose by Gopher's rules of quality: length, symbols, lists, letters, stop words."""

    name: ClassVar[str] = "gopher"

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
    """How many of the, be, to, of, and, that, have, with a document has at least; 0 for other languages."""

    def __post_init__(self) -> None:
        check_counts(
            min_words=self.min_words,
            max_words=self.max_words,
            min_mean_word_length=self.min_mean_word_length,
            max_mean_word_length=self.max_mean_word_length,
            max_symbols=self.max_symbols,
            min_stop_words=self.min_stop_words,
        )
        check_fractions(
            max_bullet_lines=self.max_bullet_lines,
            max_ellipsis_lines=self.max_ellipsis_lines,
            min_alphabetic_words=self.min_alphabetic_words,
        )

    def apply(self, record: Record) -> Record | Dropped:
        """The record, if no rule drops it."""
        from napkin.curation.filters.document_counts import text_statistics

        return first_failure(self.comparisons(text_statistics(record.text, repetition=False))) or record

    def failing_rules(self, text: str) -> list[str]:
        """The names of all rules that would drop a text."""
        from napkin.curation.filters.document_counts import text_statistics

        return failures(self.comparisons(text_statistics(text, repetition=False)))

    def comparisons(self, counts: "TextStatistics") -> Iterator[Comparison]:
        """Each rule, in the paper's order, with the value of a text and the threshold beyond which it is dropped."""
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
class GopherRepetition:
    """Drop documents that repeat themselves by Gopher's rules: lines, paragraphs, short and long n-grams of words.

    Fractions of characters are of all characters of the text. An n-gram's second and later occurrences are duplicates;
    a character in several of them counts once. datatrove goes on n words behind a duplicate, which leaves characters
    out; but its words are shorter, since punctuation is separated, and as many of them stand twice more often.
    """

    name: ClassVar[str] = "gopher-repetition"

    max_repeated_lines: float = 0.3
    """Fraction of lines that stood in the document before, at most."""
    max_repeated_paragraphs: float = 0.3
    """Fraction of paragraphs that stood in the document before, at most."""
    max_repeated_line_characters: float = 0.2
    """Fraction of characters in lines that stood in the document before, at most."""
    max_repeated_paragraph_characters: float = 0.2
    """Fraction of characters in paragraphs that stood in the document before, at most."""
    max_top_n_gram_characters: tuple[float, float, float] = (0.2, 0.18, 0.16)
    """Fraction of characters in the most frequent n-gram of 2, 3 and 4 words, at most."""
    max_repeated_n_gram_characters: tuple[float, float, float, float, float, float] = (
        0.15,
        0.14,
        0.13,
        0.12,
        0.11,
        0.10,
    )
    """Fraction of characters in duplicate n-grams of 5 to 10 words, at most."""

    def __post_init__(self) -> None:
        check_fractions(
            max_repeated_lines=self.max_repeated_lines,
            max_repeated_paragraphs=self.max_repeated_paragraphs,
            max_repeated_line_characters=self.max_repeated_line_characters,
            max_repeated_paragraph_characters=self.max_repeated_paragraph_characters,
        )
        for value in self.max_top_n_gram_characters:
            check_fractions(max_top_n_gram_characters=value)
        for value in self.max_repeated_n_gram_characters:
            check_fractions(max_repeated_n_gram_characters=value)

    def apply(self, record: Record) -> Record | Dropped:
        """The record, if no rule drops it."""
        from napkin.curation.filters.document_counts import text_statistics

        return first_failure(self.comparisons(text_statistics(record.text))) or record

    def failing_rules(self, text: str) -> list[str]:
        """The names of all rules that would drop a text."""
        from napkin.curation.filters.document_counts import text_statistics

        return failures(self.comparisons(text_statistics(text)))

    def comparisons(self, counts: "TextStatistics") -> Iterator[Comparison]:
        """Each rule, in the order of table A1, with the value of a text and its threshold."""
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
