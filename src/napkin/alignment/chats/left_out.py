"""What of a file is not trained on, counted by reason."""

from collections import Counter
from collections.abc import Mapping


class LeftOut:
    """Counts of what is left out, and the first line of each reason.

    Args:
        by_reason: what is left out already, as `by_reason` gives it.
    """

    def __init__(self, by_reason: Mapping[str, tuple[int, int]] | None = None) -> None:
        kept = by_reason or {}
        self.counts = Counter({reason: n for reason, (n, _) in kept.items()})
        self.first_lines = {reason: line for reason, (_, line) in kept.items()}

    def add(self, line: int, reason: str) -> None:
        """Count a line; `reason` says what is wrong with it."""
        self.counts[reason] += 1
        self.first_lines.setdefault(reason, line)

    @property
    def n(self) -> int:
        """How many there are."""
        return self.counts.total()

    @property
    def by_reason(self) -> dict[str, tuple[int, int]]:
        """How many there are, and the line of the first."""
        return {reason: (n, self.first_lines[reason]) for reason, n in self.counts.items()}

    def describe(self) -> str:
        """The reasons in one line, the most frequent first."""
        ordered = sorted(self.counts.items(), key=lambda each: (-each[1], self.first_lines[each[0]]))
        return ", ".join(f"{n:,} {reason} (line {self.first_lines[reason]:,})" for reason, n in ordered)
