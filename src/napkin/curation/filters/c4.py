"""The rules of C4 (Raffel et al. 2020, JMLR 21(140), section 2.2): lines that are not sentences, and what they reveal.

As in the code that made C4 (tensorflow_datasets, c4_utils.py): a line is judged by the first reason that holds, lorem
ipsum and curly brackets are searched for in lines that end sentences. The list of bad words is the stage `word-list`.
Ours are: what a sentence is (`count_sentences`), and that case is folded in ASCII only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from napkin.curation.filters.thresholds import Comparison, check_counts, failures, first_failure
from napkin.curation.record import Record, TraceEntry
from napkin.curation.stage import Dropped

if TYPE_CHECKING:
    from napkin.curation.filters.sentence_lines import C4Lines


@dataclass(frozen=True)
class C4:
    """Keep only lines that end a sentence, and drop documents with too few of them, by the rules of C4.

    Removed are lines without a full stop, question mark, exclamation mark or quotation mark at their end, with few
    words or a very long one, about JavaScript or on cookies and terms of use. Those that stay are separated by line
    feeds.
    """

    name: ClassVar[str] = "c4"

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

    def __post_init__(self) -> None:
        check_counts(
            min_sentences=self.min_sentences,
            min_line_words=self.min_line_words,
            max_word_characters=self.max_word_characters,
        )

    def apply(self, record: Record) -> Record | Dropped:
        """The record with the lines that stay, if no rule drops it."""
        found = self._lines(record.text)
        dropped = first_failure(self.comparisons(found))
        if dropped is not None:
            return dropped
        record.text = found.text
        removed = ", ".join(f"{reason}: {count}" for reason, count in found.removed.items() if count)
        record.trace.append(TraceEntry(self.name, f"lines removed: {removed}" if removed else ""))
        return record

    def failing_rules(self, text: str) -> list[str]:
        """The names of all rules that would drop a text."""
        return failures(self.comparisons(self._lines(text)))

    def comparisons(self, found: "C4Lines") -> Iterator[Comparison]:
        """Each rule that drops documents, with the value of a text and its threshold."""
        if self.lorem_ipsum:
            yield "lorem ipsum", found.lorem_ipsum, ">", 0
        if self.curly_bracket:
            yield "curly bracket", found.curly_bracket, ">", 0
        yield "too few sentences", found.sentences, "<", self.min_sentences

    def _lines(self, text: str) -> "C4Lines":
        from napkin.curation.filters.document_counts import c4_lines

        return c4_lines(text, self.min_line_words, self.max_word_characters)
