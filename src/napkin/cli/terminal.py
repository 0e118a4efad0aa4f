"""What people see: results on standard output, progress on standard error, colour on a terminal alone."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from napkin.units import format_seconds

out = Console(soft_wrap=False, highlight=False)
err = Console(stderr=True, highlight=False)

Options = TypeVar("Options")

# Lines of progress where there is no terminal to redraw: one in this many seconds.
SECONDS_BETWEEN_LINES = 10.0


def parse(options: type[Options], command: str, arguments: Sequence[str], default: Options | None = None) -> Options:
    """Read a command's options into its dataclass; `--help` shows its docstrings, defaults and units."""
    parsed = tyro.cli(
        options,
        prog=f"napkin {command}",
        args=list(arguments),
        default=default,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    )
    assert parsed is not None
    return parsed


def print_json(value: Any) -> None:
    """Print a result for programs."""
    sys.stdout.write(json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=2) + "\n")


class _Ending(ProgressColumn):
    """The time left, from the rate so far; the time taken, once all is done."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(format_seconds(task.finished_time or 0.0))
        if not task.total or not task.completed or task.elapsed is None:
            return Text("")
        left = task.elapsed / task.completed * (task.total - task.completed)
        return Text(f"{format_seconds(left)} left")


class ProgressLine:
    """One line of progress: redrawn on a terminal, repeated every ten seconds elsewhere."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, details="")
        self._title = title
        self._shown = time.monotonic()

    def __call__(self, done: int, total: int | None, details: str = "") -> None:
        """Say how far the work is; `total` None or 0 where nobody knows."""
        self._progress.update(self._task, completed=done, total=total or None, details=details)
        if not err.is_terminal and time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            share = f" {done / total:.0%}" if total else ""
            err.print(f"{self._title}{share} {details}".rstrip())

    def retitle(self, title: str) -> None:
        """Say what is being done now."""
        self._title = title
        self._progress.update(self._task, description=title)


@contextmanager
def progress_line(title: str) -> Iterator[ProgressLine]:
    """Show progress while the block runs; nothing of it stays on the screen."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.details}"),
        _Ending(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        yield ProgressLine(progress, title)
