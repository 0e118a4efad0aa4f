"""The table rule | count | meter | meter/count for a terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from napkin.accounting.quantity_row import QuantityRow
from napkin.accounting.quantity_table import laid_out


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
