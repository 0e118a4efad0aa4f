"""Progress on standard error: one line that is redrawn on a terminal, a line every ten seconds elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
from rich.text import Text

from napkin.cli.common.terminal import err, printable
from napkin.units import format_seconds

# Without a terminal to redraw, a line is printed once in this many seconds.
SECONDS_BETWEEN_LINES = 10.0
BAR_WIDTH = 20


class ProgressLine:
    """One line of progress."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._title = printable(title)
        self._task = progress.add_task(self._title, total=None, fraction=None, details="", left="")
        self._shown = time.monotonic()
        self._first: tuple[int, float] | None = None

    def __call__(self, done: int, total: int | None, details: str = "") -> None:
        """Show how much is done; `total` is None or 0 if unknown."""
        left, details = self._left(done, total or 0), printable(details)
        self._progress.update(self._task, fraction=done / total if total else None, details=details, left=left)
        if not err.is_terminal and time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            percentage = f"{done / total:.0%}" if total else ""
            line = "  ".join(filter(None, [self._title, percentage, details, left]))
            self._progress.console.print(line, soft_wrap=True)

    def retitle(self, title: str) -> None:
        """Show what is being done now."""
        title = printable(title)
        if title != self._title:
            self._title, self._first = title, None
            self._progress.update(self._task, description=title, fraction=None, details="", left="")

    def _left(self, done: int, total: int) -> str:
        # Measured since this line began: a resumed run did most of its steps in another process.
        if self._first is None:
            self._first = (done, time.monotonic())
        first, begin = self._first
        if not first < done < total:
            return ""
        return f"{format_seconds((time.monotonic() - begin) / (done - first) * (total - done))} left"


@contextmanager
def progress_line(title: str, *, shown: bool = True) -> Iterator[ProgressLine]:
    """Show progress while the block runs, unless `shown` is false; it is erased from the terminal afterwards."""
    console = err if shown else Console(quiet=True)
    with Progress(SpinnerColumn(), _Line(), console=console, transient=True, disable=not err.is_terminal) as progress:
        yield ProgressLine(progress, title)


class _Line(ProgressColumn):
    def render(self, task: Task) -> Text:
        fields, left = task.fields, task.fields["left"]
        # The spinner takes two columns; a character in the very last column would wrap on some terminals.
        return compose_line(task.description, fields["fraction"], fields["details"], left, width=err.width - 3)


def compose_line(title: str, fraction: float | None, details: str, left: str, *, width: int) -> Text:
    """Title, bar, details and time left in at most `width` columns: the bar is dropped first, then the title, then the
    last of the details, which two spaces separate.

    >>> compose_line("encoding", 0.5, "3 MB", "2 s left", width=40).plain
    'encoding  ━━━━━━━━━━━━━━  3 MB  2 s left'
    >>> compose_line("encoding", 0.5, "3 MB", "2 s left", width=15).plain
    '3 MB  2 s left'
    >>> compose_line("training", 0.5, "step 3/6  loss 2.1  9 MB", "2 s left", width=28).plain
    'step 3/6  loss 2.1  2 s left'
    """
    text = "  ".join(filter(None, [title, details, left]))
    room = min(BAR_WIDTH, width - len(text) - 2)
    if fraction is not None and room >= 4:
        done = round(room * fraction)
        bar = Text.assemble(("━" * done, "bar.complete"), ("━" * (room - done), "bar.back"))
        parts = [Text(title), bar, Text(details), Text(left)]
        return Text("  ").join([part for part in parts if part.plain])
    parts = [details] if details else []
    while len(text) > width and parts:
        text = "  ".join(filter(None, [*parts, left]))
        parts = "  ".join(parts).split("  ")[:-1]
    line = Text(text)
    line.truncate(width, overflow="ellipsis")
    return line
