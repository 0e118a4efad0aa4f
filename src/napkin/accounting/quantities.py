"""One quantity three times, side by side: by rule of thumb, by count, and by meter.

Accounting reconciles such rows, a run folder keeps them (in plan.json and measurement.json), and a report shows them.

The table that every run ends with is rule | count | meter | meter/count (`QuantityTable`). The accountant's objects
print as a few lines of text, and in a notebook as a small table (`Summary`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

from napkin.units import (
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    format_share,
    format_three_digits,
)

Unit = Literal[
    "FLOP", "bytes", "seconds", "count", "FLOP/s", "share", "USD", "kWh", "FLOP/byte", "tokens/s", "nats", "bits"
]


@dataclass(frozen=True)
class QuantityRow:
    """One quantity by rule, by count and by meter; None where one of them does not give it.

    Figures are in the unit named, never scaled (bytes, not GB; a fraction of 1, not of 100). Integers stay integers, so
    that counts can be compared exactly.
    """

    quantity: str
    unit: Unit
    rule: int | float | None = None
    """The figure by a closed form."""
    count: int | float | None = None
    """The figure by tracing one real training step."""
    meter: int | float | None = None
    """The figure by measuring the run; always None in a plan."""
    note: str = ""
    """The convention that the figures follow, and why they differ."""

    @property
    def meter_over_count(self) -> float | None:
        """The metered figure divided by the counted one; None where either is missing or the count is zero.

        >>> QuantityRow("peak bytes", "bytes", count=400, meter=410).meter_over_count
        1.025
        """
        if self.meter is None or not self.count:
            return None
        return self.meter / self.count

    @property
    def exact(self) -> bool:
        """True if meter and count are the same whole number."""
        return self.meter is not None and self.meter == self.count and self.meter == int(self.meter)


def format_figure(value: int | float | None, unit: Unit) -> str:
    """Print one figure: three significant digits, but whole counts below 10^12 in full; GB are 10^9 bytes.

    >>> format_figure(124439808, "count"), format_figure(2.722e9, "bytes"), format_figure(0.4123, "share")
    ('124,439,808', '2.72 GB', '41.2%')
    >>> format_figure(None, "seconds")
    '–'
    """
    if value is None:
        return "–"
    if unit == "count":
        return f"{int(value):,}" if value == int(value) and abs(value) < 1e12 else format_count(float(value))
    if unit == "share":
        return format_share(float(value))
    if unit in ("USD", "kWh"):
        amount = format_count(float(value)) if abs(value) >= 1000 else format_three_digits(float(value))
        return f"${amount}" if unit == "USD" else f"{amount} kWh"
    if unit in ("nats", "bits"):
        return f"{value:.4f}"
    if unit in ("FLOP/byte", "tokens/s"):
        return f"{format_three_digits(float(value))} {unit}"
    formats = {"FLOP": format_flops, "bytes": format_bytes, "seconds": format_seconds, "FLOP/s": format_rate}
    return formats[unit](float(value))


def format_ratio(row: QuantityRow) -> str:
    """Print meter/count: "exact" for equal whole numbers, else three significant digits, four decimals near 1.

    >>> format_ratio(QuantityRow("tokens", "count", count=512, meter=512))
    'exact'
    >>> format_ratio(QuantityRow("bytes", "bytes", count=1000, meter=973))
    '0.973'
    """
    if row.exact:
        return "exact"
    ratio = row.meter_over_count
    if ratio is None:
        return "–"
    return f"{ratio:.4f}" if abs(ratio - 1) < 0.005 else format_three_digits(ratio)


Line = tuple[str, str]
"""A name and its figures."""


class Summary:
    """An object whose `repr` is a few lines, the first of which is its heading."""

    def summary(self) -> Iterator[Line]:
        """Yield the heading and its figures, then a line for each quantity."""
        raise NotImplementedError

    def __repr__(self) -> str:
        (title, heading), *lines = self.summary()
        width = max((len(name) for name, _ in lines), default=0)
        return "\n".join([f"{title}: {heading}", *(f"  {name:<{width}}  {figures}" for name, figures in lines)])

    def _repr_html_(self) -> str:
        (title, heading), *lines = self.summary()
        return as_html(lines, caption=f"{title}: {heading}")


def as_html(
    rows: Iterable[Iterable[str]], *, header: Iterable[str] = (), caption: str = "", notes: Iterable[str] = ()
) -> str:
    """A table of cells; the first cell of each row is its heading. All text is escaped."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row" style="text-align: left">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        "<table>"
        + (f'<caption style="text-align: left">{escape(caption)}</caption>' if caption else "")
        + (f"<thead><tr>{head}</tr></thead>" if head else "")
        + f"<tbody>{body}</tbody></table>"
        + "".join(f"<div><small>{escape(note)}</small></div>" for note in notes)
    )


def largest(parts: Iterable[tuple[str, float]], most: int = 4) -> list[tuple[str, float]]:
    """The `most` largest parts that are not zero, and all others together.

    >>> largest([("a", 1), ("b", 5), ("c", 0), ("d", 2)], most=2)
    [('b', 5), ('d', 2), ('others', 1)]
    """
    ordered = sorted(((name, value) for name, value in parts if value), key=lambda part: -part[1])
    rest = sum(value for _, value in ordered[most:])
    return [*ordered[:most], *([("others", rest)] if rest else [])]


def with_calls(calls: Mapping[str, int]) -> str:
    """The names that were called most, with the numbers of their calls.

    >>> with_calls({"sort": 2, "fft": 1200})
    'fft (1,200 ×), sort (2 ×)'
    """
    return ", ".join(f"{name} ({number:,} ×)" for name, number in largest(calls.items()))


def with_parts(whole: float, parts: Iterable[tuple[str, float]], show: Callable[[float], str]) -> str:
    """A figure and what it consists of.

    >>> with_parts(3, [("a", 1), ("b", 2)], str)
    '3: a 1; b 2'
    """
    text = "; ".join(f"{name} {show(value)}" for name, value in parts)
    return f"{show(whole)}: {text}" if text else show(whole)


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
