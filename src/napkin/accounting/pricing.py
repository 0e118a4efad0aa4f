"""Price a ledger on a machine: seconds of each operator by its roofline or by microbenchmark, and what bounds them.

By its roofline, an operator takes the longer of two times, that of its FLOPs at the rate for its format and shape and
that of its bytes at the memory bandwidth, and a fixed time to launch (Williams et al. 2009, "Roofline").
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.summary import Line, Summary, largest
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.conditions import Conditions
from napkin.units import format_seconds, format_share

Name = TypeVar("Name", bound=Hashable)

# A CPU's allocator gets blocks of at least this size from the operating system, and returns them, each time.
FRESH_BYTES = 32 * 2**20

ROOFLINE_FACTOR = 3.0
"""How far off a step's seconds may be by rooflines alone, which know no exponentials and no non-contiguous strides."""


CallSite = tuple[str, str, str]
"""(operator, path of the module, phase): where the calls of a step are told apart."""


@dataclass(frozen=True)
class Spent:
    """Seconds of one part of a step, and those of them that are bound by memory, not by arithmetic."""

    seconds: float
    byte_bound_seconds: float


@dataclass(frozen=True, repr=False)
class Price(Summary):
    """The predicted seconds of a step."""

    seconds: float
    byte_bound_seconds: float
    """Those of them in operators that are bound by memory, not by arithmetic."""
    by_operator: dict[str, Spent]
    """Largest first."""
    by_module: dict[str, Spent]
    """Largest first; modules whose paths differ only by a number are summed: "blocks.*.attention"."""
    by_phase: dict[str, Spent]
    """Largest first."""
    factor: float
    """In nine cases of ten a step is expected to take between seconds / factor and seconds · factor."""
    by_call_site: dict[CallSite, Spent] = field(default_factory=dict)
    """Largest first; the paths of modules have their numbers."""
    conditions: Conditions | None = None
    """What other processes did while operators were timed; None where none were, and on a GPU."""

    @property
    def disturbed(self) -> bool:
        """Whether other processes disturbed the timing of operators: the seconds are an upper bound."""
        return self.conditions is not None and self.conditions.busy

    @property
    def byte_bound_share(self) -> float:
        """Fraction of the seconds in operators that are bound by memory, not by arithmetic."""
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
    conditions: Conditions | None = None,
) -> Price:
    """Predict the seconds of a step on a machine.

    Args:
        ledger: the step.
        ceilings: the machine: a `Calibration`, or `CatalogueCeilings` of a device that is not at hand.
        timed: seconds of calls that were run there alone (`time_operators`); the seconds of all others are those of
            their roofline.
        between: how much longer a step takes than the sum of its operators, as a factor that each is multiplied by.
        factor: how far off the result may be, up or down, in nine cases of ten.
        conditions: what other processes did while the calls were run.
    """
    known = timed or {}
    sites: defaultdict[CallSite, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in ledger.rows:
        seconds = known.get(row.call)
        seconds = between * (roofline_seconds(row, ceilings) if seconds is None else seconds)
        byte_bound = seconds if _is_byte_bound(row, ceilings) else 0.0
        spent = sites[row.operator, row.module, row.phase]
        spent[0] += seconds
        spent[1] += byte_bound
    by_phase = _summed(sites, lambda site: site[2])
    return Price(
        seconds=sum(spent.seconds for spent in by_phase.values()),
        byte_bound_seconds=sum(spent.byte_bound_seconds for spent in by_phase.values()),
        by_operator=_summed(sites, lambda site: site[0]),
        by_module=_summed(sites, lambda site: numbered_alike(site[1])),
        by_phase=by_phase,
        factor=factor,
        by_call_site=_summed(sites, lambda site: site),
        conditions=conditions,
    )


def roofline_seconds(row: Row, ceilings: Ceilings) -> float:
    """Seconds of one call: FLOPs or bytes, whichever takes longer; fresh memory from the system; the launch.

    A collective takes none: its seconds are those of the interconnect.
    """
    if row.collective is not None:
        return 0.0
    fresh = row.bytes_allocated * ceilings.seconds_per_fresh_byte if row.bytes_allocated >= FRESH_BYTES else 0.0
    bound = max(_seconds_of_flops(row, ceilings), _seconds_of_bytes(row, ceilings)) + fresh
    if ceilings.calls_overlap:
        # A view launches no kernel, and its call is hidden behind kernels that run.
        return bound + ceilings.seconds_per_operator if bound else 0.0
    return bound + ceilings.seconds_per_operator


def launch_share(ledger: Ledger, ceilings: Ceilings, seconds: float) -> float:
    """Fraction of a step's `seconds` that is the overhead of operator calls; a view is none."""
    calls = sum(bool(row.flops or row.bytes_read or row.bytes_written) for row in ledger.rows)
    return calls * ceilings.seconds_per_operator / (seconds or 1.0)


def _is_byte_bound(row: Row, ceilings: Ceilings) -> bool:
    return _seconds_of_bytes(row, ceilings) > _seconds_of_flops(row, ceilings)


def numbered_alike(module: str) -> str:
    """A module's path with its numbers left out: "blocks.*.attention"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _summed(sites: Mapping[CallSite, list[float]], name_of: Callable[[CallSite], Name]) -> dict[Name, Spent]:
    """The sites that have a name in common together, largest first."""
    sums: defaultdict[Name, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for site, (seconds, byte_bound) in sites.items():
        spent = sums[name_of(site)]
        spent[0] += seconds
        spent[1] += byte_bound
    return {name: Spent(*spent) for name, spent in sorted(sums.items(), key=lambda item: -item[1][0])}


def _seconds_of_flops(row: Row, ceilings: Ceilings) -> float:
    if row.contraction is None or not row.flops:
        return 0.0
    batch, m, n, k = row.contraction
    flops = row.flops + row.recomputed_flops
    if row.is_fused_attention:
        # Tiles above the diagonal are skipped.
        rate = ceilings.attention_rate(row.format, m, n, k, heads=batch, cudnn="cudnn" in row.operator)
        return flops * row.causal_flops / row.flops / rate
    return flops / ceilings.matmul_rate(row.format, m, n, k)


def _seconds_of_bytes(row: Row, ceilings: Ceilings) -> float:
    touched = row.bytes_read + row.bytes_written
    return touched / ceilings.bandwidth(touched) if touched else 0.0
