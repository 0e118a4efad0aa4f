"""rule | count | meter | meter/count: the table that every run ends with."""

from collections.abc import Sequence
from typing import NamedTuple

from napkin.accounting.quantity_row import QuantityRow, format_figure, format_ratio
from napkin.accounting.summary import as_html

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class QuantityTable(list[QuantityRow]):
    """A list of quantities that prints as a table.

    >>> print(QuantityTable([QuantityRow("peak bytes", "bytes", 400, 500, 505, "no activations")]))
    quantity      rule  count  meter  meter/count
    peak bytes¹  400 B  500 B  505 B         1.01
    ¹ no activations
    """

    def __repr__(self) -> str:
        header, rows, notes = laid_out(self)
        cells = [header, *rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        lines = [
            "  ".join(
                f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        ]
        return "\n".join([*lines, *notes])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        header, rows, notes = laid_out(self)
        return as_html(rows, header=header, notes=notes)


class Layout(NamedTuple):
    """The text of a table, cell by cell."""

    header: list[str]
    rows: list[list[str]]
    """The quantity, marked with the number of its note, then its figures."""
    notes: list[str]
    """Each note once, with its number."""


def laid_out(rows: Sequence[QuantityRow]) -> Layout:
    """The cells of a table; without the meter's columns where no row has a meter, as in a plan."""
    metered = any(row.meter is not None for row in rows)
    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    cells = []
    for row in rows:
        mark = _superscript(notes.index(row.note) + 1) if row.note else ""
        figures = [format_figure(value, row.unit) for value in (row.rule, row.count)]
        meter = [format_figure(row.meter, row.unit), format_ratio(row)] if metered else []
        cells.append([row.quantity + mark, *figures, *meter])
    header = ["quantity", "rule", "count", *(["meter", "meter/count"] if metered else [])]
    return Layout(header, cells, [f"{_superscript(number)} {note}" for number, note in enumerate(notes, 1)])


def _superscript(number: int) -> str:
    return str(number).translate(_SUPERSCRIPTS)
