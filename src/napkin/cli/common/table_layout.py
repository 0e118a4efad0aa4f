"""Where the columns of a table go on a terminal of some width: no figure is broken, and no column is lost.

In turn: less space between columns; names broken after a space, a point, a slash or an underscore, headings after a
space; the columns that are left over in another table below, which begins with the first column too.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

JOINT = re.compile(r"(?<=[\s._/])(?=\S)")
"""Where a name may be broken."""
WIDEST_KEY, NARROWEST_KEY = 0.6, 6
"""What the first column of several tables takes: this part of the width at most, so many columns at least."""


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
        # What is left over goes to the columns that were narrowed, the last one first.
        for i in reversed(range(1, len(chosen))):
            room = width - _total(widths, 2)
            widths[i] += max(0, min(room, columns[chosen[i]].natural - widths[i]))
        yield Block(tuple(chosen), tuple(widths))
