"""What a loss can be drawn over: steps, tokens, FLOPs, seconds or dollars."""

from typing import Literal

import numpy as np

from napkin.accounting.quantity_row import Unit
from napkin.report.curves import Curve
from napkin.runs.run_record import RunRecord

Axis = Literal["steps", "tokens", "flops", "seconds", "dollars"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "flops", "seconds", "dollars")
LABELS: dict[Axis, str] = {
    "steps": "steps",
    "tokens": "tokens",
    "flops": "FLOPs",
    "seconds": "seconds",
    "dollars": "dollars",
}
UNITS: dict[Axis, Unit] = {
    "steps": "count",
    "tokens": "count",
    "flops": "FLOP",
    "seconds": "seconds",
    "dollars": "USD",
}
_POWERS = {
    1e21: "10²¹",
    1e18: "10¹⁸",
    1e15: "10¹⁵",
    1e12: "10¹²",
    1e9: "billions",
    1e6: "millions",
    1e3: "thousands",
}


class Positions:
    """The position of each logged step of a run on each axis."""

    def __init__(self, record: RunRecord, *, usd_per_hour: float | None = None) -> None:
        plan = record.plan
        self._flops_per_step = sum(plan.flops_by_phase.values()) if plan else None
        self._usd_per_second = _usd_per_second(record, usd_per_hour)
        self._steps, self._tokens, self._seconds = (
            np.array([getattr(logged, name) for logged in record.metrics], dtype=np.float64)
            for name in ("step", "tokens", "seconds")
        )

    def along(self, axis: Axis) -> Curve:
        """The positions on an axis; empty if they are not known."""
        nothing = np.empty(0)
        match axis:
            case "steps":
                return self._steps
            case "tokens":
                return self._tokens
            case "seconds":
                return self._seconds
            case "flops":
                return nothing if self._flops_per_step is None else self._steps * self._flops_per_step
            case "dollars":
                return nothing if self._usd_per_second is None else self._seconds * self._usd_per_second


def unit_and_label(axis: Axis, end: float) -> tuple[float, str]:
    """The unit in which an axis up to `end` is labelled, and its label.

    >>> unit_and_label("tokens", 2.5e6), unit_and_label("seconds", 7200.0)
    ((1000000.0, 'tokens, in millions'), (3600.0, 'hours'))
    """
    if axis == "seconds":
        units = [(86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")]
        return next(((unit, name) for unit, name in units if end >= 2 * unit), (1.0, "seconds"))
    if axis == "dollars":
        return 1.0, "dollars"
    label = LABELS[axis]
    return next(((unit, f"{label}, in {name}") for unit, name in _POWERS.items() if end >= unit), (1.0, label))


def _usd_per_second(record: RunRecord, usd_per_hour: float | None) -> float | None:
    if usd_per_hour is not None:
        return usd_per_hour / 3600
    plan = record.plan
    if plan is None or plan.dollars is None or not plan.seconds:
        return None
    return plan.dollars / plan.seconds
