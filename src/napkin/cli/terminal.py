"""What people see: results on standard output, progress on standard error, colour on a terminal alone."""

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
from rich.text import Text

from napkin.units import format_seconds


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        # rich would leave with status 1 itself.
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


# No markup and no emoji codes: "[...]" and ":x:" in a file's name stand for themselves.
out = _Console(highlight=False, markup=False, emoji=False)
err = _Console(stderr=True, highlight=False, markup=False, emoji=False)

# Lines of progress where there is no terminal to redraw: one in this many seconds.
SECONDS_BETWEEN_LINES = 10.0
BAR_WIDTH = 20


def say(text: str, **style: Any) -> None:
    """Print a line of a result: wrapped at words on a terminal, whole elsewhere."""
    out.print(text, soft_wrap=not out.is_terminal, **style)


def say_aside(text: str) -> None:
    """Print a line that is not a result, on standard error."""
    err.print(text, soft_wrap=True)


def say_verbatim(text: str) -> None:
    """Print what a model wrote: as it is, but on a terminal without what would steer it."""
    if out.is_terminal:
        text = "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
    sys.stdout.write(text + "\n")


def print_json(value: Any) -> None:
    """Print a result for programs: JSON in ASCII, null for a number that is not finite."""
    finite = msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))
    sys.stdout.write(json.dumps(finite, indent=2) + "\n")


class ProgressLine:
    """One line of progress: redrawn on a terminal, repeated every ten seconds elsewhere."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, share=None, details="", left="")
        self._title = title
        self._shown = time.monotonic()
        self._first: tuple[int, float] | None = None

    def __call__(self, done: int, total: int | None, details: str = "") -> None:
        """Say how far the work is; `total` None or 0 where nobody knows."""
        left = self._left(done, total or 0)
        self._progress.update(self._task, share=done / total if total else None, details=details, left=left)
        if not err.is_terminal and time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            share = f"{done / total:.0%}" if total else ""
            line = "  ".join(filter(None, [self._title, share, details, left]))
            self._progress.console.print(line, soft_wrap=True)

    def retitle(self, title: str) -> None:
        """Say what is being done now."""
        if title != self._title:
            self._title, self._first = title, None
            self._progress.update(self._task, description=title, share=None, details="", left="")

    def _left(self, done: int, total: int) -> str:
        # From where this line began: a resumed run has done most of its steps in another process.
        if self._first is None:
            self._first = (done, time.monotonic())
        first, begin = self._first
        if not first < done < total:
            return ""
        return f"{format_seconds((time.monotonic() - begin) / (done - first) * (total - done))} left"


@contextmanager
def progress_line(title: str, *, shown: bool = True) -> Iterator[ProgressLine]:
    """Show progress while the block runs, if it is to be `shown`; nothing of it stays on the screen."""
    console = err if shown else Console(quiet=True)
    with Progress(SpinnerColumn(), _Line(), console=console, transient=True, disable=not err.is_terminal) as progress:
        yield ProgressLine(progress, title)


class _Line(ProgressColumn):
    def render(self, task: Task) -> Text:
        shown = task.fields
        # Two columns are the spinner's; a character in the last column of all would wrap on some terminals.
        return compose_line(task.description, shown["share"], shown["details"], shown["left"], width=err.width - 3)


def compose_line(title: str, share: float | None, details: str, left: str, *, width: int) -> Text:
    """Title, bar, details and time left in at most `width` columns: the bar gives way first, then the title.

    >>> compose_line("encoding", 0.5, "3 MB", "2 s left", width=40).plain
    'encoding  ━━━━━━━━━━━━━━  3 MB  2 s left'
    >>> compose_line("encoding", 0.5, "3 MB", "2 s left", width=15).plain
    '3 MB  2 s left'
    """
    text = "  ".join(filter(None, [title, details, left]))
    room = min(BAR_WIDTH, width - len(text) - 2)
    if share is not None and room >= 4:
        done = round(room * share)
        bar = Text.assemble(("━" * done, "bar.complete"), ("━" * (room - done), "bar.back"))
        parts = [Text(title), bar, Text(details), Text(left)]
        return Text("  ").join([part for part in parts if part.plain])
    if len(text) > width and details:
        text = "  ".join(filter(None, [details, left]))
    line = Text(text)
    line.truncate(width, overflow="ellipsis")
    return line
