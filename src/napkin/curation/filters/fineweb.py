"""The rules that FineWeb adds to those of others.

The paper has three of them with their thresholds (Penedo et al. 2024, arXiv:2406.17557, section 3.6). The code that
made the dataset (datatrove's `FineWebQualityFilter`) differs in two: it drops a document with 1% of its characters in
repeated lines where the paper says 10%, and one with more than 0.3 line feeds per word: the paper has no such rule.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from napkin.curation.filters.thresholds import Comparison, check_counts, check_fractions, failures, first_failure, share
from napkin.curation.record import Record
from napkin.curation.stage import Dropped

if TYPE_CHECKING:
    from napkin.curation.filters.text_counts import TextStatistics


@dataclass(frozen=True)
class FineWeb:
    """Drop lists and menus by FineWeb's rules: lines without full stops, lines said twice, short lines.

    Rules and thresholds are the paper's, which were chosen by models trained with and without each. The code that made
    the dataset has two others: max_repeated_line_characters 0.01 and max_line_feeds_per_word 0.3.
    """

    name: ClassVar[str] = "fineweb"

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

    def __post_init__(self) -> None:
        check_fractions(
            min_terminated_lines=self.min_terminated_lines,
            max_repeated_line_characters=self.max_repeated_line_characters,
            max_short_lines=self.max_short_lines,
        )
        if self.max_line_feeds_per_word is not None:
            check_counts(max_line_feeds_per_word=self.max_line_feeds_per_word)

    def apply(self, record: Record) -> Record | Dropped:
        """The record, if no rule drops it."""
        from napkin.curation.filters.document_counts import text_statistics

        return first_failure(self.comparisons(text_statistics(record.text))) or record

    def failing_rules(self, text: str) -> list[str]:
        """The names of all rules that would drop a text."""
        from napkin.curation.filters.document_counts import text_statistics

        return failures(self.comparisons(text_statistics(text)))

    def comparisons(self, counts: "TextStatistics") -> Iterator[Comparison]:
        """Each rule with the value of a text and its threshold."""
        terminated = share(counts.terminated_lines, counts.lines)
        yield "lines without punctuation", terminated, "<=", self.min_terminated_lines
        repeated = share(counts.repeated_line_characters, counts.line_characters)
        yield "characters of repeated lines", repeated, ">=", self.max_repeated_line_characters
        yield "short lines", share(counts.short_lines, counts.lines), ">=", self.max_short_lines
        if self.max_line_feeds_per_word is not None:
            line_feeds = share(counts.line_feeds, counts.words)
            yield "line feeds per word", line_feeds, ">", self.max_line_feeds_per_word
