"""Price a ledger on a machine: seconds by a roofline an operator, or as timed, and what bounds them.

An operator takes the longer of two times, that of its FLOPs at the rate for its format and shape and that of its bytes
at the bandwidth of memory, and a fixed time to launch (Williams et al. 2009, "Roofline").
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.summary import Line, Summary, largest
from napkin.hardware.ceilings import Ceilings
from napkin.units import format_seconds, format_share

# A CPU's allocator takes blocks of at least this size from the system, and gives them back, each time.
FRESH_BYTES = 32 * 2**20

ROOFLINE_FACTOR = 3.0
"""How far off a step's seconds may be by rooflines alone: no roofline knows an exponential or a broken stride."""


@dataclass(frozen=True)
class Spent:
    """Seconds of a step that went to one thing, and those of them that waited for memory, not for arithmetic."""

    seconds: float
    byte_bound_seconds: float


@dataclass(frozen=True, repr=False)
class Price(Summary):
    """What a step is predicted to take."""

    seconds: float
    byte_bound_seconds: float
    """Those of them in operators that wait for memory, not for arithmetic."""
    by_operator: dict[str, Spent]
    """Largest first."""
    by_module: dict[str, Spent]
    """Largest first; modules that differ by a number alone, the blocks, are taken together: "blocks.*.attention"."""
    by_phase: dict[str, Spent]
    """Largest first."""
    factor: float
    """Nine steps in ten are expected to take between seconds / factor and seconds · factor."""

    @property
    def byte_bound_share(self) -> float:
        """Share of the seconds in operators that wait for memory, not for arithmetic."""
        return self.byte_bound_seconds / self.seconds

    def summary(self) -> Iterator[Line]:
        """The price in a few lines."""
        bound = format_share(self.byte_bound_share) if self.seconds else "none"
        yield "Price", f"{format_seconds(self.seconds)} per step, within a factor of {self.factor:.2f}"
        yield "bound by bytes", f"{bound} of the time"
        for name, parts in (("phase", self.by_phase), ("operator", self.by_operator), ("module", self.by_module)):
            named = ((part or "(no module)", spent.seconds) for part, spent in parts.items())
            yield f"by {name}", "; ".join(f"{part} {format_seconds(seconds)}" for part, seconds in largest(named))


def price(
    ledger: Ledger,
    ceilings: Ceilings,
    timed: Mapping[Hashable, float] | None = None,
    *,
    between: float = 1.0,
    factor: float = ROOFLINE_FACTOR,
) -> Price:
    """Predict the seconds of a step on a machine.

    Args:
        ledger: the step.
        ceilings: the machine: a `Calibration`, or `CatalogueCeilings` of a device that is not at hand.
        timed: seconds of the calls that were run there alone (`time_operators`); all others take what their roofline
            says.
        between: how much longer a step takes than its operators alone, each of which is given its part of that.
        factor: how far off the result may be, up or down, in nine cases of ten.
    """
    known = timed or {}
    sums: dict[str, defaultdict[str, list[float]]] = {
        column: defaultdict(lambda: [0.0, 0.0]) for column in ("operator", "module", "phase")
    }
    for row in ledger.rows:
        seconds = known.get(row.call)
        seconds = between * (roofline_seconds(row, ceilings) if seconds is None else seconds)
        byte_bound = seconds if _is_byte_bound(row, ceilings) else 0.0
        for column, name in (("operator", row.operator), ("module", _numbered_alike(row.module)), ("phase", row.phase)):
            spent = sums[column][name]
            spent[0] += seconds
            spent[1] += byte_bound
    by = {column: _largest_first(spent) for column, spent in sums.items()}
    return Price(
        seconds=sum(spent.seconds for spent in by["phase"].values()),
        byte_bound_seconds=sum(spent.byte_bound_seconds for spent in by["phase"].values()),
        by_operator=by["operator"],
        by_module=by["module"],
        by_phase=by["phase"],
        factor=factor,
    )


def roofline_seconds(row: Row, ceilings: Ceilings) -> float:
    """Seconds of one call: FLOPs or bytes, whichever takes longer; memory taken from the system; the launch."""
    fresh = row.bytes_allocated * ceilings.seconds_per_fresh_byte if row.bytes_allocated >= FRESH_BYTES else 0.0
    bound = max(_seconds_of_flops(row, ceilings), _seconds_of_bytes(row, ceilings)) + fresh
    if ceilings.calls_overlap:
        # A view starts no kernel: its call is hidden behind those that run.
        return max(bound, ceilings.seconds_per_operator) if bound else 0.0
    return bound + ceilings.seconds_per_operator


def _is_byte_bound(row: Row, ceilings: Ceilings) -> bool:
    return _seconds_of_bytes(row, ceilings) > _seconds_of_flops(row, ceilings)


def _numbered_alike(module: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _largest_first(sums: Mapping[str, list[float]]) -> dict[str, Spent]:
    return {name: Spent(*spent) for name, spent in sorted(sums.items(), key=lambda item: -item[1][0])}


def _seconds_of_flops(row: Row, ceilings: Ceilings) -> float:
    if row.contraction is None:
        return 0.0
    _, m, n, k = row.contraction
    return (row.flops + row.recomputed_flops) / ceilings.matmul_rate(row.format, m, n, k)


def _seconds_of_bytes(row: Row, ceilings: Ceilings) -> float:
    touched = row.bytes_read + row.bytes_written
    return touched / ceilings.bandwidth(touched) if touched else 0.0
