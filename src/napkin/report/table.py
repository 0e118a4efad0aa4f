"""The reconciliation table, rule | count | meter | meter/count, and the format of its figures."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from napkin.accounting.quantity_row import QuantityRow, Unit
from napkin.units import format_bytes, format_count, format_flops, format_rate, format_seconds

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def reconcile_table(rows: Sequence[QuantityRow]) -> Table:
    """Rule, count and meter side by side, for terminals of 80 columns or more.

    The columns of the meter are left out if no row has one, as in a plan. Notes are numbered below the table, each
    once.
    """
    metered = any(row.meter is not None for row in rows)
    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    footnotes = "\n".join(f"{_superscript(number)} {note}" for number, note in enumerate(notes, 1))
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        # Notes are as wide as the table, and a plan's two columns would be too narrow.
        min_width=66,
        header_style="bold",
        caption=Text(footnotes) if notes else None,
        caption_justify="left",
        caption_style="dim",
    )
    table.add_column("quantity")
    for name in ["rule", "count", *(["meter", "meter/count"] if metered else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        mark = _superscript(notes.index(row.note) + 1) if row.note else ""
        figures = [row.rule, row.count, *([row.meter] if metered else [])]
        cells = [format_figure(value, row.unit) for value in figures]
        # Text, not markup: a "[" in a quantity's name stands for itself.
        table.add_row(Text(row.quantity + mark), *cells, *([format_ratio(row)] if metered else []))
    return table


def format_figure(value: int | float | None, unit: Unit) -> str:
    """Format a figure: three significant digits, but integer counts below 10^12 in full; 1 GB is 10^9 bytes.

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
    if unit in ("FLOP/byte", "tokens/s"):
        return f"{format_three_digits(float(value))} {unit}"
    formats = {"FLOP": format_flops, "bytes": format_bytes, "seconds": format_seconds, "FLOP/s": format_rate}
    return formats[unit](float(value))


def format_share(share: float) -> str:
    """Format a fraction as a percentage.

    >>> format_share(0.4123), format_share(1), format_share(0.0123)
    ('41.2%', '100%', '1.23%')
    """
    return format_three_digits(100 * share) + "%"


def format_ratio(row: QuantityRow) -> str:
    """Format meter/count: "exact" for equal integers, else three significant digits, or four decimals near 1.

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


def format_three_digits(value: float) -> str:
    """Format a number with three significant digits, trailing zeros included.

    >>> format_three_digits(2.4), format_three_digits(186.35), format_three_digits(12345.6)
    ('2.40', '186', '12346')
    """
    if value == 0 or 999.5 <= abs(value) < 1e6:
        return f"{value:.0f}"
    # "#" keeps trailing zeros, and leaves a point that may be the last character.
    return f"{value:#.3g}".removesuffix(".")


def _superscript(number: int) -> str:
    return str(number).translate(_SUPERSCRIPTS)
