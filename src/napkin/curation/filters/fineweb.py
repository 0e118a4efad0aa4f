"""The three rules that FineWeb adds to those of others (Penedo et al. 2024, arXiv:2406.17557, section 3.6)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from napkin.curation.filters.thresholds import Comparison, check_fractions, failures, first_failure, share
from napkin.curation.record import Record
from napkin.curation.stage import Dropped

if TYPE_CHECKING:
    from napkin.curation.filters.text_counts import TextStatistics


@dataclass(frozen=True)
class FineWeb:
    """Drop lists and menus by FineWeb's rules: lines without full stops, lines said twice, short lines.

    Thresholds are the paper's. datatrove's own default for repeated lines is 0.01, and it drops documents with many
    line feeds per word as well.
    """

    name: ClassVar[str] = "fineweb"

    min_terminated_lines: float = 0.12
    """A document is dropped if at most this fraction of its lines ends with a mark that ends sentences."""
    max_repeated_line_characters: float = 0.1
    """A document is dropped if at least this fraction of its lines' characters is in lines that stood in it before."""
    max_short_lines: float = 0.67
    """A document is dropped if at least this fraction of its lines has fewer than 30 characters."""

    def __post_init__(self) -> None:
        check_fractions(
            min_terminated_lines=self.min_terminated_lines,
            max_repeated_line_characters=self.max_repeated_line_characters,
            max_short_lines=self.max_short_lines,
        )

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
