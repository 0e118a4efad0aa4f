"""The books of a step of reinforcement learning by phase: tokens, FLOPs, peak bytes, seconds and dollars."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from napkin.accounting.ledger import Ledger
from napkin.accounting.metering import StepMeasurement, meter_step
from napkin.accounting.pricing import dollars
from napkin.accounting.quantities import QuantityRow, Unit
from napkin.train_step.step import Watch
from napkin.tuning.reinforcement_step import PHASES, Phases, Result


@dataclass(frozen=True)
class PhaseMetrics:
    """The costs of a phase, per step; None is unknown."""

    tokens: float | None = None
    """Tokens through the model, padding included."""
    flops: float | None = None
    peak_bytes: float | None = None
    """The most bytes allocated while the phase runs, weights and optimizer state included."""
    seconds: float | None = None


_UNITS: dict[str, Unit] = {"tokens": "count", "flops": "FLOP", "peak_bytes": "bytes", "seconds": "seconds"}
ByPhase = Mapping[str, PhaseMetrics]


TOKENS = "tokens per step"
"""The row of all phases' tokens."""


def sum_of(metrics: Iterable[float | None]) -> float | None:
    """Add up the known values; None without any."""
    known = [each for each in metrics if each is not None]
    return sum(known) if known else None


def tokens_of(by_phase: ByPhase) -> float | None:
    return sum_of(each.tokens for each in by_phase.values())


def joined(ledgers: Sequence[Ledger]) -> Ledger:
    """One ledger of computations that follow each other; its bytes are those of the last."""
    *before, last = ledgers
    n_before = sum(len(each.rows) for each in before)
    unknown = [Counter(each.unknown_operators) for each in ledgers]
    return replace(
        last,
        rows=tuple(row for each in ledgers for row in each.rows),
        timeline=tuple(moment._replace(row=moment.row + n_before) for moment in last.timeline),
        unknown_operators=dict(sum(unknown, Counter())),
    )


def phase_rows(rule: ByPhase, count: ByPhase, usd_per_hour: float | None) -> list[QuantityRow]:
    """The rows of a plan: the tokens of a step, and each quantity of each phase that it has."""
    rows = [QuantityRow(TOKENS, "count", tokens_of(rule), tokens_of(count))]
    nothing = PhaseMetrics()
    for phase in PHASES:
        by_rule, counted = rule.get(phase, nothing), count.get(phase, nothing)
        for what, unit in _UNITS.items():
            metrics = getattr(by_rule, what), getattr(counted, what)
            if metrics != (None, None):
                rows.append(QuantityRow(row_name(phase, what), unit, *metrics))
        if usd_per_hour is not None and counted.seconds is not None:
            rows.append(QuantityRow(row_name(phase, "dollars"), "USD", None, dollars(counted.seconds, usd_per_hour)))
    return rows


def metered_rows(metered: ByPhase, usd_per_hour: float | None) -> dict[str, float]:
    """The metered values by the names of the plan's rows."""
    found: dict[str, float] = {TOKENS: tokens_of(metered) or 0}
    for phase, metrics in metered.items():
        for what in _UNITS:
            value = getattr(metrics, what)
            if value is not None:
                found[row_name(phase, what)] = value
        if usd_per_hour is not None and metrics.seconds is not None:
            found[row_name(phase, "dollars")] = dollars(metrics.seconds, usd_per_hour)
    return found


def row_name(phase: str, what: str) -> str:
    """A row's name, such as "rollout: peak bytes"."""
    return f"{phase}: {'FLOPs' if what == 'flops' else what.replace('_', ' ')}"


@dataclass
class PhaseTimes(Phases):
    """Times the phases of steps; grading within the rollout is a phase of its own."""

    steps: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each step, by phase."""
    _now: dict[str, float] = field(default_factory=dict)

    def run(self, phase: str, function: Callable[[], Result]) -> Result:
        begin, graded = time.perf_counter(), self._now.get("reward", 0.0)
        result = function()
        # Grading within the phase was timed by `watching`.
        within = self._now.get("reward", 0.0) - graded
        self._now[phase] = self._now.get(phase, 0.0) + time.perf_counter() - begin - within
        return result

    def watching(self, watch: Watch) -> Watch:
        """Wrap a watch so that the seconds of "reward" are kept here too."""

        @contextmanager
        def watched(part: str) -> Iterator[None]:
            begin = time.perf_counter()
            with watch(part):
                yield
            if part == "reward":
                self._now[part] = self._now.get(part, 0.0) + time.perf_counter() - begin

        return watched

    def end_step(self) -> None:
        for phase, seconds in self._now.items():
            self.steps.setdefault(phase, []).append(seconds)
        self._now = {}

    @property
    def medians(self) -> dict[str, float]:
        return {phase: statistics.median(seconds) for phase, seconds in self.steps.items()}


@dataclass
class PhaseMeters(Phases):
    """Meters the phases of one step."""

    model: nn.Module
    device_type: str
    resident: Callable[[], Iterable[Tensor]]
    """The tensors that last: weights and the optimizer's state."""
    found: dict[str, StepMeasurement] = field(default_factory=dict)

    def run(self, phase: str, function: Callable[[], Result]) -> Result:
        results: list[Result] = []
        self.found[phase] = meter_step(
            self.model,
            lambda: results.append(function()),
            device_type=self.device_type,
            resident=self.resident() if self.device_type == "cpu" else None,
        )
        return results[0]

    @property
    def step(self) -> StepMeasurement:
        """All phases together: their operators, and the largest of their peaks."""
        found = [self.found[phase] for phase in PHASES if phase in self.found]
        ledger = joined([each.ledger for each in found])
        return replace(found[-1], ledger=ledger, peak_bytes=max(each.peak_bytes for each in found))
