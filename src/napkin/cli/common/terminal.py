"""The one place that prints: results on standard output, messages on standard error, colour only on a terminal.

Names of files and folders, patterns and the contents of files come from outside. Characters in them that do not print
are shown as escapes, so that no name can control the terminal.

A table never breaks a figure and never loses a column. On a narrow terminal, in turn: less space between columns; names
broken after a space, a point, a slash or an underscore, headings after a space; the columns that are left over in
another table below, which begins with the first column too.
"""

import errno
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

JOINT = re.compile(r"(?<=[\s._/])(?=\S)")
"""Where a name may be broken."""
WIDEST_KEY, NARROWEST_KEY = 0.6, 6
"""Limits on the width of the first column where a table is split: at most this part of the terminal's width, at least
this many characters."""


@dataclass(frozen=True)
class Column:
    """The widths that a column can have."""

    natural: int
    least: int

    @classmethod
    def of(cls, heading: str, cells: Sequence[str], *, is_text: bool) -> "Column":
        """A column of texts, or of figures, which are never broken."""
        lines = [line for cell in cells for line in cell.splitlines()]
        natural = max(map(cell_len, [heading, *lines]), default=0)
        pieces = [piece for line in lines for piece in (JOINT.split(line) if is_text else [line])]
        return cls(natural, max((cell_len(piece.rstrip()) for piece in [*heading.split(), *pieces]), default=0))


@dataclass(frozen=True)
class Block:
    """Some of the columns, as one table."""

    columns: tuple[int, ...]
    widths: tuple[int, ...]
    gap: int = 2
    """Spaces between two columns."""
    has_edge: bool = False
    """True if a space stands before the first column and after the last."""


def lay_out(columns: Sequence[Column], width: int, *, edge: bool) -> list[Block]:
    """The tables that show all columns in `width`, usually one; a column that is wider than `width` alone is cut."""
    everything, natural = tuple(range(len(columns))), tuple(column.natural for column in columns)
    for has_edge, gap in ((edge, 2), (False, 2), (False, 1)):
        if _total(natural, gap, has_edge=has_edge) <= width:
            return [Block(everything, natural, gap, has_edge)]
    for gap in (2, 1):
        if _total([column.least for column in columns], gap) <= width:
            return [Block(everything, _shrunk(columns, width, gap), gap)]
    return list(_stacked(columns, width))


def wrapped(text: str, width: int) -> str:
    """A text with line breaks at its joints, or where a piece alone is too wide, within it.

    >>> wrapped("blocks.*.feed_forward", 12).splitlines()
    ['blocks.*.', 'feed_forward']
    """
    lines: list[str] = []
    for whole in text.splitlines() or [""]:
        line = ""
        for piece in JOINT.split(whole):
            if line and cell_len((line + piece).rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += piece
            while cell_len(line.rstrip()) > width:
                lines.append(line[:width])
                line = line[width:]
        lines.append(line)
    return "\n".join(lines)


def _total(widths: Sequence[int], gap: int, *, has_edge: bool = False) -> int:
    return sum(widths) + gap * (len(widths) - 1) + 2 * has_edge


def _shrunk(columns: Sequence[Column], width: int, gap: int) -> tuple[int, ...]:
    """The widths after narrowing what is widest, until all fit."""
    widths = [min(column.natural, max(width, column.least)) for column in columns]
    while _total(widths, gap) > width:
        candidates = [i for i, column in enumerate(columns) if widths[i] > column.least]
        if not candidates:
            break
        widths[max(candidates, key=lambda i: widths[i])] -= 1
    return tuple(widths)


def _stacked(columns: Sequence[Column], width: int) -> Iterator[Block]:
    rest = list(range(1, len(columns)))
    widest = max((columns[i].least for i in rest), default=0)
    key = max(1, min(columns[0].natural, round(width * WIDEST_KEY), max(NARROWEST_KEY, width - 2 - widest)))
    if not rest:
        yield Block((0,), (min(columns[0].natural, width),))
    while rest:
        chosen, widths = [0], [key]
        while rest and (
            len(chosen) == 1 or _total([*widths, min(columns[rest[0]].natural, columns[rest[0]].least)], 2) <= width
        ):
            column = columns[rest[0]]
            widths.append(min(column.least, width - key - 2))
            chosen.append(rest.pop(0))
        # The remaining width goes to the columns that were narrowed, the last one first.
        for i in reversed(range(1, len(chosen))):
            room = width - _total(widths, 2)
            widths[i] += max(0, min(room, columns[chosen[i]].natural - widths[i]))
        yield Block(tuple(chosen), tuple(widths))


def printable(text: str, *, keep: str = "") -> str:
    r"""Text whose characters that do not print are shown as escapes, except those in `keep`.

    >>> print(printable("\x1b[31mred\n"))
    \x1b[31mred\n
    """
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


LONGEST_MESSAGE = 2000
"""Characters; a longer one repeats a value that was given."""
WIDEST_TABLE = 10_000
"""Columns of a table that no terminal shows."""


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        # rich would leave with status 1 itself.
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def print_in(self, renderable: RenderableType, width: int) -> None:
        """Print in that many columns, which may be more than the terminal has."""
        before, self.width = self._width, width
        try:
            self.print(renderable, crop=False)
        finally:
            self._width = before

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        # Everything that rich prints passes through here; segments with `control` are rich's own.
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text, keep="\n\t"), segment.style)


class _MessageConsole(_Console):
    """Standard error, of which no failure may end a command: a lost terminal must not stop a run."""

    @property
    def file(self) -> Any:
        # rich asks for the file at each use: tests and programs may replace sys.stderr.
        return _UntilLost(super().file)

    @file.setter
    def file(self, new_file: Any) -> None:
        self._file = new_file


class _UntilLost:
    """A stream that goes to the null device once it cannot be written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard(self._stream)


def discard(stream: Any) -> None:
    """Send to the null device what is still buffered in a stream, and everything that follows."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


@contextmanager
def output_may_be_lost() -> Iterator[None]:
    """While the block runs, standard output may have gone, with the terminal or the reader of a pipe."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)


# No markup and no emoji codes: "[...]" and ":x:" in a file's name stand for themselves.
out = _Console(highlight=False, markup=False, emoji=False)
err = _MessageConsole(stderr=True, highlight=False, markup=False, emoji=False)


def is_coloured() -> bool:
    """True if standard output shows colours."""
    return out.color_system is not None and not out.no_color


def say(text: str = "", *, style: str | None = None, wrap: bool = True, keep_lines: bool = False) -> None:
    """Print a line of a result, without `wrap` as one line even if it is wider than the terminal.

    A line break in the text is an escape too, unless `keep_lines`.
    """
    shown = printable(text, keep="\n" if keep_lines else "")
    out.print(shown, style=style, soft_wrap=not (wrap and out.is_terminal))


def notify(message: str) -> None:
    """Print a message on standard error, as one line; of a very long one, its beginning and its end."""
    line = printable(" ".join(message.split()))
    if len(line) > LONGEST_MESSAGE:
        half = LONGEST_MESSAGE // 2
        line = f"{line[:half]} ... {line[-half:]}"
    err.print(line, soft_wrap=True)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    align: str = "",
    style: str = "",
    droppable: Sequence[str] = (),
) -> None:
    """Print a table without rules; `headings` may be empty.

    Where not all columns stand beside each other unbroken, those with the headings `droppable` are left out, in that
    order. `align` has an "l" or an "r" per column. By default the first column is aligned left and the others right,
    and a table without headings all left.
    """
    cells = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in rows]
    n_columns = len(headings) or max(map(len, cells), default=0)
    align = align or ("l" + "r" * (n_columns - 1) if headings else "l" * n_columns)
    titles = [printable(heading) for heading in headings] or [""] * n_columns
    columns = [
        Column.of(titles[i], [row[i].plain for row in cells if i < len(row)], is_text=align[i] == "l")
        for i in range(n_columns)
    ]
    width = _table_width()
    shown = list(range(n_columns))
    for heading in droppable:
        if sum(columns[i].natural + 1 for i in shown) - 1 > width:
            shown.remove(titles.index(printable(heading)))
    cells = [[row[i] for i in shown if i < len(row)] for row in cells]
    columns, titles, align = [columns[i] for i in shown], [titles[i] for i in shown], "".join(align[i] for i in shown)
    for number, block in enumerate(lay_out(columns, width, edge=bool(headings))):
        if number:
            say()
        table = Table(
            box=None,
            header_style="bold",
            show_header=bool(headings),
            padding=(0, 1) if block.gap == 2 else (0, 1, 0, 0),
            pad_edge=block.has_edge,
            style=style,
        )
        for i, wide in zip(block.columns, block.widths, strict=True):
            justify = "left" if align[i] == "l" else "right"
            table.add_column(Text(wrapped(titles[i], wide)), justify=justify, width=wide, overflow="fold")
        for row in cells:
            shown = zip(block.columns, block.widths, strict=True)
            table.add_row(*(_narrowed(row[i], wide) if i < len(row) else "" for i, wide in shown))
        out.print_in(table, width)


def _narrowed(cell: Text, width: int) -> Text:
    # A coloured text is broken by rich, at any character.
    return cell if cell.spans else Text(wrapped(cell.plain, width))


def _table_width() -> int:
    """Columns of the terminal; what is read by a program is not narrowed, unless COLUMNS says so."""
    if out.is_terminal:
        return out.width
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else WIDEST_TABLE


def print_rich(renderable: RenderableType, *, wrap: bool = True) -> None:
    """Print what rich can render: a table, or coloured text."""
    out.print(renderable, soft_wrap=not wrap, crop=False)


def print_verbatim(text: str, *, end: str = "\n") -> None:
    """Print a text as it is, such as what a model wrote; on a terminal, what could control it is replaced.

    Without a line feed as its `end`, it is a piece that is shown at once.
    """
    if out.is_terminal:
        text = "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
    sys.stdout.write(text + end)
    if not end:
        sys.stdout.flush()


def print_json(value: Any) -> None:
    """Print a result for programs: JSON in ASCII, null for a number that is not finite."""
    finite = msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))
    sys.stdout.write(json.dumps(finite, indent=2) + "\n")
