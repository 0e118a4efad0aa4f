"""The three witnesses of a quantity, side by side: the rule of thumb, the count, and the meter.

What accounting reconciles, a run folder keeps (in plan.json and measurement.json) and a report shows.
"""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["FLOP", "bytes", "seconds", "count", "FLOP/s", "share", "USD", "kWh", "FLOP/byte", "tokens/s"]


@dataclass(frozen=True)
class QuantityRow:
    """One quantity as up to three witnesses give it; None where a witness says nothing.

    Figures are in the unit named, never scaled (bytes, not GB; a share of 1, not of 100). Integers stay integers, so
    that counts can be compared exactly.
    """

    quantity: str
    unit: Unit
    rule: int | float | None = None
    """By napkin mathematics: a closed form."""
    count: int | float | None = None
    """By tracing one real training step."""
    meter: int | float | None = None
    """By measuring the run; always None in a plan."""
    note: str = ""
    """The convention that the figures follow, and why they differ."""

    @property
    def meter_over_count(self) -> float | None:
        """How much of the count was measured; None where either is missing or the count is zero.

        >>> QuantityRow("peak bytes", "bytes", count=400, meter=410).meter_over_count
        1.025
        """
        if self.meter is None or not self.count:
            return None
        return self.meter / self.count

    @property
    def exact(self) -> bool:
        """Whether the meter read the very whole number that the count gives."""
        return self.meter is not None and self.meter == self.count and self.meter == int(self.meter)
