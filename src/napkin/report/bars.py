"""Bars of the page of a run, as lengths in percent; the template makes them of HTML, so that they need no script.

The table rule | count | meter | meter/count for a terminal.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from napkin.accounting.quantities import QuantityRow, laid_out
from napkin.report.xy_picture import shade
from napkin.runs.accounting_files import Evaluation
from napkin.units import format_three_digits


class Segment(NamedTuple):
    """A part of a stacked bar."""

    colour: str
    percent: float


class StackedBar(NamedTuple):
    """Parts of a whole, side by side."""

    segments: list[Segment]
    outlined: bool
    """True if the whole bar is a limit that the parts are compared with; it is outlined."""
    description: str


class Bar(NamedTuple):
    """A bar with its name and figure."""

    name: str
    figure: str
    colour: str
    percent: float


def stacked_bar(parts: Mapping[str, float], description: str, *, limit: float | None = None) -> StackedBar:
    """Parts as one stacked bar in the colours of `shade`.

    With a `limit`, such as the free memory, 100% is the limit, unless the parts would be too small to see.
    """
    # A remainder such as "other" may be slightly negative.
    sizes = {part: max(0.0, size) for part, size in parts.items()}
    total = sum(sizes.values(), 0.0)
    outlined = bool(limit and 0.2 * limit <= total)
    full = max(total, limit or 0.0) if outlined else total
    segments = [Segment(shade(part), round(100 * size / (full or 1.0), 3)) for part, size in sizes.items()]
    return StackedBar(segments, outlined, description)


def bits_bars(evaluation: Evaluation) -> list[Bar]:
    """Bits per byte of held-out text for the model, xz and gzip; the longest bar has 100%."""
    bits = {
        "this model": evaluation.bits_per_byte,
        "xz -9": evaluation.xz_bits_per_byte,
        "gzip -9": evaluation.gzip_bits_per_byte,
    }
    longest = max(bits.values()) or 1.0
    return [
        Bar(name, format_three_digits(value), "grey" if index else "blue", round(100 * value / longest, 3))
        for index, (name, value) in enumerate(bits.items())
    ]


def reconcile_table(rows: Sequence[QuantityRow]) -> Table:
    """Lay rule, count and meter side by side for a terminal of 80 columns or more.

    The meter's columns are left out where no row has a meter (a plan). Notes stand below the figures, numbered, each
    once.
    """
    (first, *others), cells, notes = laid_out(rows)
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        # Notes are as wide as the table, and a plan's two columns would be too narrow.
        min_width=66,
        header_style="bold",
        caption=Text("\n".join(notes)) if notes else None,
        caption_justify="left",
        caption_style="dim",
    )
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for quantity, *figures in cells:
        # Text, not markup: a "[" in a quantity's name is a bracket.
        table.add_row(Text(quantity), *figures)
    return table
