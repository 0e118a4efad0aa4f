"""One quantity three times, side by side: by rule of thumb, by count, and by meter.

Accounting reconciles such rows, a run folder keeps them (in plan.json and measurement.json), and a report shows them.
"""

from dataclasses import dataclass
from typing import Literal

from napkin.units import (
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    format_share,
    format_three_digits,
)

Unit = Literal["FLOP", "bytes", "seconds", "count", "FLOP/s", "share", "USD", "kWh", "FLOP/byte", "tokens/s", "nats"]


@dataclass(frozen=True)
class QuantityRow:
    """One quantity by rule, by count and by meter; None where one of them does not give it.

    Figures are in the unit named, never scaled (bytes, not GB; a fraction of 1, not of 100). Integers stay integers, so
    that counts can be compared exactly.
    """

    quantity: str
    unit: Unit
    rule: int | float | None = None
    """By a closed form."""
    count: int | float | None = None
    """By tracing one real training step."""
    meter: int | float | None = None
    """By measuring the run; always None in a plan."""
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
        """Whether meter and count are the same whole number."""
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
    if unit == "nats":
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
