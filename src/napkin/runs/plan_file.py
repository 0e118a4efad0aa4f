"""plan.json: what was predicted before the first step. The one declaration; `napkin.planning` fills it in."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

import msgspec

from napkin.accounting.quantity_row import QuantityRow

NonNegative = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class PlannedDevice:
    """The devices that the plan was made for; figures are those of one."""

    name: str
    kind: str
    """cpu or cuda."""
    matmul_peak: NonNegative
    """FLOP/s of dense matrix products in `format`."""
    format: str
    memory_bytes: NonNegative
    precision: str = ""


@dataclass(frozen=True)
class PlanFile:
    """Bytes, FLOPs and seconds are never scaled; what is split into parts is one step."""

    napkin: str
    created: datetime
    device: PlannedDevice
    steps: int
    tokens_per_step: int
    fits: bool
    seconds: NonNegative
    """Of all steps."""
    peak_by_category: dict[str, NonNegative]
    flops_by_phase: dict[str, NonNegative]
    seconds_by_operator: dict[str, NonNegative]
    table: tuple[QuantityRow, ...]
    versions: dict[str, str] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    """Number formats, by what is in them."""
    checkpoint_bytes: int = 0
    seconds_factor: float = 1.0
    """Nine steps in ten are expected to take between seconds / factor and seconds · factor."""
    dollars: NonNegative | None = None
    """Of all steps; None where no price is known."""
    kilowatt_hours: NonNegative | None = None
    seconds_by_phase: dict[str, NonNegative] = field(default_factory=dict)
    byte_bound_by_operator: dict[str, NonNegative] = field(default_factory=dict)
    """Those of the seconds that wait for memory, not for arithmetic."""
    seconds_by_module: dict[str, NonNegative] = field(default_factory=dict)
    byte_bound_by_module: dict[str, NonNegative] = field(default_factory=dict)
    communication: dict[str, NonNegative] = field(default_factory=dict)
    """Bytes that each device sends per step, their seconds, and those of the seconds that no computation hides."""
    compile: dict[str, Any] = field(default_factory=dict)
    unknown_operators: dict[str, int] = field(default_factory=dict)
    """Calls per step of operators whose FLOPs could not be counted."""
