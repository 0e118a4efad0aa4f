"""The profile of a step: for each operator, module and phase what was planned, what was measured, and the roofs."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from napkin.accounting.ledger import Ledger, numbered_alike
from napkin.accounting.pricing import CallSite, Price, Roofs, computed_flops
from napkin.accounting.quantities import Line, Summary, largest
from napkin.profiling.operator_calls import ENGINE, PYTHON, CallsOfStep
from napkin.units import format_bytes, format_rate, format_seconds, format_share

By = Literal["operator", "module", "phase"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over some calls of a step."""

    calls: float = 0.0
    counted_calls: int = 0
    """The number of calls in the ledger of a real step."""
    seconds: float = 0.0
    planned_seconds: float = 0.0
    flops: int = 0
    """FLOPs of contractions, recomputation counted; of fused attention those that its mask leaves."""
    elementwise_flops: int = 0
    bytes_touched: int = 0
    """Read and written, each operand once."""
    roof_seconds: float = 0.0
    """The least that the roofs allow."""
    byte_bound_seconds: float = 0.0
    """The roofline seconds of calls that are bound by bytes."""

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Figures)))

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of contractions."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_touched / self.seconds if self.seconds else 0.0

    @property
    def roof_share(self) -> float | None:
        """Fraction of the seconds that the roofs allow for; above 1 where operands stay in a cache."""
        return self.roof_seconds / self.seconds if self.seconds and self.roof_seconds else None

    @property
    def bound(self) -> Literal["FLOPs", "bytes", ""]:
        """The roof that binds."""
        if not self.roof_seconds:
            return ""
        return "bytes" if 2 * self.byte_bound_seconds > self.roof_seconds else "FLOPs"


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """The calls of one operator from one module in one phase."""

    operator: str
    module: str
    phase: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class OutsideRow:
    """Seconds of a step in no operator, before the calls of a module in a phase."""

    name: str
    module: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ProfiledSpan:
    """One call in the step that `trace` shows, or its kernel. Moments are in nanoseconds from the step's begin."""

    operator: str
    module: str
    phase: str
    begin: int
    end: int
    flops: float = 0.0
    bytes_touched: int = 0
    kernel: str = ""
    """The device's name for it; "" on the host."""
    stream: int = 0


@dataclass(frozen=True, repr=False)
class StepProfile(Summary):
    """The seconds of a step by operator: a mean over some steps."""

    rows: tuple[ProfileRow, ...]
    """Rows from the longest on."""
    outside: tuple[OutsideRow, ...]
    """Time in no row: with the rows, all of the step."""
    seconds: float
    """Seconds of a step by the profiler's clock: the sum of `rows` and `outside`."""
    profiled_seconds: tuple[float, ...]
    plain_seconds: tuple[float, ...]
    """Seconds of a step without the profiler, next to each of them."""
    ledger: Ledger
    """The ledger of a real step, recorded operator by operator."""
    row_moments: tuple[float | None, ...]
    """For each row of the ledger, the seconds from the step's begin to the end of its call; None for one not seen."""
    trace: tuple[ProfiledSpan, ...]
    """The calls of the step whose seconds are the median."""
    trace_seconds: float
    device_name: str
    device_type: str
    roofs: Roofs | None = None
    price: Price | None = None
    """The seconds that were planned; None without a plan."""
    planned_ledger: Ledger | None = None
    """The ledger that was planned with; None where the step was only recorded."""
    title: str = "a step"
    ranks: tuple[dict[str, float], ...] = field(default=())
    """For each of several ranks its seconds, and its seconds in operators, in collectives and outside."""

    def by(self, column: By) -> dict[str, Figures]:
        """The rows summed by a column, longest first; modules that differ only in numbers are one."""
        sums: dict[str, Figures] = {}
        for row in self.rows:
            name = named_by(row, column)
            sums[name] = sums.get(name, Figures()) + row.figures
        return dict(sorted(sums.items(), key=lambda item: -item[1].seconds))

    def outside_by(self, key: Callable[[OutsideRow], str]) -> dict[str, float]:
        """The seconds outside of operators, summed by a key, most first."""
        sums: dict[str, float] = {}
        for row in self.outside:
            sums[key(row)] = sums.get(key(row), 0.0) + row.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @cached_property
    def total(self) -> Figures:
        """The sum of all rows."""
        return summed(row.figures for row in self.rows)

    @property
    def explained(self) -> float:
        """Fraction of the step's seconds that the rows have."""
        return self.total.seconds / self.seconds if self.seconds else 0.0

    @property
    def located(self) -> float:
        """Fraction of the step's seconds in operators, or in Python or torch inside of a module or function, named."""
        nowhere = sum(row.seconds for row in self.outside if row.name in (PYTHON, ENGINE) and not row.module)
        return 1 - nowhere / self.seconds if self.seconds else 0.0

    @property
    def overheads(self) -> list[float]:
        """The relative excess of each profiled step over the one beside it without the profiler, sorted."""
        pairs = zip(self.profiled_seconds, self.plain_seconds, strict=True)
        return sorted(profiled / plain - 1 for profiled, plain in pairs)

    @property
    def overhead(self) -> float:
        """The median overhead. It varies as the machine does: `overheads` shows by how much."""
        return statistics.median(self.overheads)

    def summary(self) -> Iterator[Line]:
        """The profile in a few lines."""
        yield "StepProfile", f"{format_seconds(self.seconds)} per step on {self.device_name}"
        yield "in operators", format_share(self.explained)
        for name, seconds in self.outside_by(lambda row: row.name).items():
            yield name, f"{format_seconds(seconds)}, {format_share(seconds / self.seconds)}"
        operators = ((name, figures.seconds) for name, figures in self.by("operator").items())
        yield "operators", "; ".join(f"{name} {format_seconds(seconds)}" for name, seconds in largest(operators))
        flops, touched = self.total.flops / self.seconds, self.total.bytes_touched / self.seconds
        yield "reached", f"{format_rate(flops)}, {format_bytes(touched)}/s"
        yield "overhead of profiling", format_share(self.overhead)


def named_by(row: ProfileRow | OutsideRow, column: By) -> str:
    """The name under which a row is summed: modules that differ only in numbers are one."""
    name = getattr(row, column)
    return numbered_alike(name) if column == "module" else name


def middle(values: Iterable[float]) -> float:
    """The value in the middle, the lower of two: one of the values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def summed(figures: Iterable[Figures]) -> Figures:
    total = Figures()
    for each in figures:
        total = total + each
    return total


def profile_rows(
    steps: Iterable[tuple[CallsOfStep, list[int | None]]], ledger: Ledger, roofs: Roofs | None, price: Price | None
) -> tuple[tuple[ProfileRow, ...], tuple[OutsideRow, ...]]:
    """The rows of profiled steps, as means over them: what the calls took, what the ledger says of them.

    Each step comes with the number of the ledger's row of each call, as `matched_rows` finds it.
    """
    measured: Counter[CallSite] = Counter()
    calls: Counter[CallSite] = Counter()
    gaps: Counter[tuple[str, str, str]] = Counter()
    steps = list(steps)
    for step, rows in steps:
        sites = sites_of_calls(step, rows, ledger)
        for call, site in zip(step.calls, sites, strict=True):
            measured[site] += call.nanoseconds
            calls[site] += call.counts
        for gap in step.gaps:
            _, module, phase = sites[gap.before] if sites else ("", "", "")
            gaps[gap.name, module, phase] += gap.nanoseconds
    figures = {
        site: Figures(calls=calls[site] / len(steps), seconds=nanoseconds / 1e9 / len(steps))
        for site, nanoseconds in measured.items()
    }
    for site, counted in _counted(ledger, roofs).items():
        figures[site] = figures.get(site, Figures()) + counted
    for site, spent in (price.by_call_site if price else {}).items():
        figures[site] = figures.get(site, Figures()) + Figures(planned_seconds=spent.seconds)
    ordered = sorted(figures.items(), key=lambda item: -item[1].seconds)
    return (
        tuple(ProfileRow(*site, each) for site, each in ordered),
        tuple(OutsideRow(*key, nanoseconds / 1e9 / len(steps)) for key, nanoseconds in gaps.most_common()),
    )


def sites_of_calls(step: CallsOfStep, rows: list[int | None], ledger: Ledger) -> list[CallSite]:
    """The place where each call was made; one that the ledger lacks was made where the call before it was."""
    sites: list[CallSite] = []
    module, phase = "", "forward"
    for call, number in zip(step.calls, rows, strict=True):
        if number is not None:
            row = ledger.rows[number]
            module, phase = row.module, row.phase
            sites.append((row.operator, module, phase))
        else:
            sites.append((call.operator, module, phase))
    return sites


def _counted(ledger: Ledger, roofs: Roofs | None) -> Mapping[CallSite, Figures]:
    figures: dict[CallSite, Figures] = {}
    for row in ledger.rows:
        by_flops, by_bytes = roofs.seconds(row) if roofs else (0.0, 0.0)
        least = max(by_flops, by_bytes)
        counted = Figures(
            counted_calls=1,
            flops=round(computed_flops(row)),
            elementwise_flops=row.elementwise_flops,
            bytes_touched=row.bytes_read + row.bytes_written,
            roof_seconds=least,
            byte_bound_seconds=least if by_bytes > by_flops else 0.0,
        )
        site = row.operator, row.module, row.phase
        figures[site] = figures.get(site, Figures()) + counted
    return figures


def as_values(profile: StepProfile) -> dict[str, Any]:
    """The profile for programs."""
    return {
        "title": profile.title,
        "device": profile.device_name,
        "device_type": profile.device_type,
        "seconds": profile.seconds,
        "explained": profile.explained,
        "located": profile.located,
        "planned_seconds": profile.price.seconds if profile.price else None,
        "profiled_seconds": profile.profiled_seconds,
        "plain_seconds": profile.plain_seconds,
        "overhead": profile.overhead,
        "overheads": profile.overheads,
        "flops": profile.ledger.flops,
        "peak_bytes": profile.ledger.peak_bytes,
        "roofs": {"peaks": profile.roofs.peaks, "bandwidth": profile.roofs.bandwidth} if profile.roofs else None,
        "rows": [
            {
                "operator": row.operator,
                "module": row.module,
                "phase": row.phase,
                **{each.name: getattr(row.figures, each.name) for each in fields(Figures)},
                "roof_share": row.figures.roof_share,
                "bound": row.figures.bound,
            }
            for row in profile.rows
        ],
        "outside": [
            {"name": row.name, "module": row.module, "phase": row.phase, "seconds": row.seconds}
            for row in profile.outside
        ],
        "ranks": list(profile.ranks),
    }
