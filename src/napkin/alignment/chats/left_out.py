"""What of a file is not trained on, counted by reason."""

from collections import Counter


class LeftOut:
    """Counts of what is left out, and the first line of each reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first_lines: dict[str, int] = {}

    def add(self, line: int, reason: str) -> None:
        """Count a line; `reason` says what is wrong with it."""
        self.counts[reason] += 1
        self.first_lines.setdefault(reason, line)

    @property
    def n(self) -> int:
        """How many there are."""
        return self.counts.total()

    def describe(self) -> str:
        """The reasons in one line, the most frequent first."""
        ordered = sorted(self.counts.items(), key=lambda each: (-each[1], self.first_lines[each[0]]))
        return ", ".join(f"{n:,} {reason} (line {self.first_lines[reason]:,})" for reason, n in ordered)
