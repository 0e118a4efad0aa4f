"""What changed between two steps: the figures of two ledgers beside each other, exact and without noise.

Both ledgers are counts, so that any difference is one of the programs: a step that gained a copy of a tensor shows it
in bytes, to the byte, on a machine that is busy with something else.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from napkin.accounting.ledger import SUMS, Column, Ledger, numbered_alike
from napkin.accounting.pricing import Price
from napkin.accounting.quantities import Line, Summary, Unit, format_figure
from napkin.errors import NapkinError, suggestion
from napkin.units import parse_bytes, parse_count

TOTALS: dict[str, Unit] = {
    "parameters": "count",
    "calls": "count",
    "flops": "FLOP",
    "recomputed_flops": "FLOP",
    "elementwise_flops": "FLOP",
    "peak_bytes": "bytes",
    "reserved_bytes": "bytes",
    "kept_bytes": "bytes",
    "collective_bytes": "bytes",
    "seconds": "seconds",
}
"""The figures of a whole step, and their units."""
PARTS: dict[str, Unit] = {
    "calls": "count",
    **{name: "FLOP" if name.endswith("flops") else "bytes" for name in SUMS},
    "seconds": "seconds",
}
"""The figures of a part of it: those that `Ledger.sums_by` sums, and seconds where they are known."""

PLACES = {"operator": 0, "module": 1, "phase": 2}
"""The places of a price's call sites."""

Figures = Mapping[str, int | float | None]


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step that are compared with another's."""

    totals: Figures
    """Figures of the whole step, by the names in `TOTALS`."""
    peak: Mapping[str, int] = field(default_factory=dict)
    """Bytes at the peak by category."""
    parts: Mapping[str, Figures] = field(default_factory=dict)
    """For each operator, module, phase or component, figures by the names in `PARTS`; modules whose paths differ by a
    number alone are one part: "blocks.*.attention"."""
    collectives: Mapping[str, Figures] = field(default_factory=dict)
    """Calls and bytes of the collectives, by operation and number of ranks."""
    by: Column = "operator"
    """What a part is: a component, an operator, a module or a phase."""


def step_figures(ledger: Ledger, *, by: Column = "module", price: Price | None = None) -> StepFigures:
    """The figures of a ledger, with the seconds of a price where there is one."""
    collectives: dict[str, Counter[str]] = defaultdict(Counter)
    for row in ledger.rows:
        if row.collective is not None:
            sums = collectives[f"{row.collective.operation} over {row.collective.group_size} ranks"]
            sums["calls"] += 1
            sums["bytes"] += row.collective.data_bytes
    totals = {
        "parameters": ledger.parameters,
        "calls": len(ledger.rows),
        "flops": ledger.flops,
        "recomputed_flops": ledger.hardware_flops - ledger.flops,
        "elementwise_flops": ledger.elementwise_flops,
        "peak_bytes": ledger.peak_bytes,
        "reserved_bytes": ledger.reserved_bytes,
        "kept_bytes": ledger.kept_bytes,
        "collective_bytes": sum(sums["bytes"] for sums in collectives.values()),
        "seconds": None if price is None else price.seconds,
    }
    parts: dict[str, dict[str, int | float]] = {}

    def add(name: str, figures: Mapping[str, int | float]) -> None:
        sums = parts.setdefault(numbered_alike(name), {})
        for figure, value in figures.items():
            sums[figure] = sums.get(figure, 0) + value

    for name, sums in ledger.sums_by(by).items():
        add(name, sums)
    if price is not None and by in PLACES:
        for site, spent in price.by_call_site.items():
            add(site[PLACES[by]], {"seconds": spent.seconds})
    return StepFigures(totals, {**ledger.peak_by_category}, parts, collectives, by)


@dataclass(frozen=True)
class Change:
    """A figure of both steps that is not the same; None where one of them does not have it."""

    name: str
    unit: Unit
    before: int | float | None
    after: int | float | None

    @property
    def difference(self) -> int | float:
        """The increase; negative for a decrease."""
        return (self.after or 0) - (self.before or 0)

    @property
    def share(self) -> float | None:
        """The difference as a fraction of what was before; None where nothing was."""
        return self.difference / self.before if self.before else None

    @property
    def added(self) -> str:
        """The difference as text, with its sign and unit."""
        return f"{'-' if self.difference < 0 else '+'}{format_figure(abs(self.difference), self.unit)}"

    def __str__(self) -> str:
        return self.added if self.share is None else f"{self.added} ({self.share:+.2%})"


@dataclass(frozen=True, repr=False)
class StepDifference(Summary):
    """The figures in which two steps differ; empty where they are equal."""

    totals: tuple[Change, ...]
    peak: tuple[Change, ...]
    parts: Mapping[str, tuple[Change, ...]]
    """For each part that is not the same in both, its changes; those with the largest first."""
    collectives: Mapping[str, tuple[Change, ...]]
    before: StepFigures = field(repr=False)
    after: StepFigures = field(repr=False)

    @property
    def equal(self) -> bool:
        """True if no figure differs."""
        return not (self.totals or self.peak or self.parts or self.collectives)

    def summary(self) -> Iterator[Line]:
        yield "StepDifference", "the steps are equal" if self.equal else f"{len(self.totals)} totals differ"
        for change in self.totals:
            yield change.name, f"{format_figure(change.after, change.unit)}: {change}"

    def as_values(self) -> dict[str, Any]:
        """The difference for programs, as JSON has it: each change with both figures."""

        def values(changes: Iterable[Change]) -> dict[str, Any]:
            return {
                each.name: {"before": each.before, "after": each.after, "difference": each.difference}
                for each in changes
            }

        return {
            "equal": self.equal,
            "totals": values(self.totals),
            "peak_by_category": values(self.peak),
            "by": self.after.by,
            "rows": {name: values(changes) for name, changes in self.parts.items()},
            "collectives": {name: values(changes) for name, changes in self.collectives.items()},
        }


def compare_steps(before: StepFigures, after: StepFigures) -> StepDifference:
    """The figures in which `after` differs from `before`. Raises NapkinError where their parts are not of a kind."""
    if before.parts and after.parts and before.by != after.by:
        raise NapkinError(f"one step is summed by {before.by}, the other by {after.by}: count both --by {after.by}")
    sizes: dict[str, Unit] = dict.fromkeys((*before.peak, *after.peak), "bytes")
    parts = _differing(before.parts, after.parts, PARTS)
    largest_first = sorted(parts.items(), key=lambda part: _sizes(part[1]), reverse=True)
    collectives = _differing(before.collectives, after.collectives, {"calls": "count", "bytes": "bytes"})
    return StepDifference(
        _changes(before.totals, after.totals, TOTALS),
        _changes(before.peak, after.peak, sizes),
        dict(largest_first),
        collectives,
        before,
        after,
    )


def _sizes(changes: Iterable[Change]) -> list[float]:
    """How much each of a part's figures differs; parts are sorted by the first one."""
    sizes = {each.name: abs(each.difference) for each in changes}
    order = ("seconds", "flops", "bytes_allocated", "bytes_written", "bytes_read", "calls")
    return [sizes.get(name, 0) for name in order]


def _differing(
    before: Mapping[str, Figures], after: Mapping[str, Figures], units: Mapping[str, Unit]
) -> dict[str, tuple[Change, ...]]:
    names = dict.fromkeys([*after, *before])
    changes = {name: _changes(before.get(name, {}), after.get(name, {}), units) for name in names}
    return {name: differences for name, differences in changes.items() if differences}


def _changes(before: Figures, after: Figures, units: Mapping[str, Unit]) -> tuple[Change, ...]:
    pairs: Iterator[tuple[str, Unit, Any, Any]] = (
        (name, unit, before.get(name), after.get(name)) for name, unit in units.items()
    )
    return tuple(Change(name, unit, old, new) for name, unit, old, new in pairs if (old or 0) != (new or 0))


@dataclass(frozen=True)
class Limit:
    """How much a figure may grow before a comparison fails."""

    name: str
    most: float
    relative: bool
    """Whether `most` is a fraction of what was before, and not a number in the figure's unit."""

    @classmethod
    def parse(cls, text: str) -> "Limit":
        """Read "peak_bytes=2%", "peak_bytes=64MB" or "flops=0".

        >>> Limit.parse("peak-bytes=2%")
        Limit(name='peak_bytes', most=0.02, relative=True)
        """
        given, _, size = (part.strip() for part in text.partition("="))
        name = given.replace("-", "_")
        if name not in TOTALS:
            raise NapkinError(f"there is no figure '{given}' to limit: {suggestion(name, TOTALS)}")
        percent = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", size)
        if percent:
            return cls(name, float(percent[1]) / 100, relative=True)
        if name == "seconds":
            raise NapkinError(f"the limit '{text}' is not a share: write {given}=2%")
        return cls(name, parse_bytes(size) if TOTALS[name] == "bytes" else parse_count(size), relative=False)

    def is_exceeded(self, difference: StepDifference) -> bool:
        """True if the figure grew by more. Raises NapkinError where a step does not have it."""
        before, after = difference.before.totals.get(self.name), difference.after.totals.get(self.name)
        if before is None or after is None:
            needed = {"seconds": ": price both steps, with --on", "reserved_bytes": ": count both for a GPU"}
            raise NapkinError(f"there is no figure {self.name} to limit{needed.get(self.name, ' in both steps')}")
        return after - before > (self.most * before if self.relative else self.most)
