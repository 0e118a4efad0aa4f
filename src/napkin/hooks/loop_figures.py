"""The figures of a watched loop, and the table in which its plan and its meters stand side by side."""

import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import nn

from napkin.accounting.metering import StepMeasurement
from napkin.accounting.pricing import ALONE, dollars, kilowatt_hours
from napkin.accounting.quantities import QuantityRow, QuantityTable, Summary
from napkin.accounting.rank_seconds import RankSeconds
from napkin.accounting.rules import adamw_bytes_rule, training_flops_rule
from napkin.hardware.conditions import Conditions
from napkin.hooks.program_plan import ProgramPlan, flops_note
from napkin.hooks.program_ranks import ProgramRanks


@dataclass
class Spent:
    """Seconds of a watched loop by what they went to; they add up to the seconds of the loop."""

    steps: float = 0.0
    """Steps, without those that were recorded, and without waiting for data inside of them."""
    recorded: float = 0.0
    data: float = 0.0
    planning: float = 0.0
    other: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Evaluations, checkpoints, logging and the like, by name; what has none is "between steps"."""


class LoopFigures(Summary):
    """The figures of a loop so far."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self.plan: ProgramPlan | None = None
        self.obstacle = ""
        """Why the step was not planned; empty if it was planned, or no plan was requested."""
        self.steps = self.tokens = 0
        self.recorded: dict[Hashable, StepMeasurement] = {}
        """The recorded steps, by the size of their batch."""
        self.spent = Spent()
        self.n_workers: int | None = None
        """Processes that load the data; None if unknown."""
        self.step_seconds: dict[Hashable, list[float]] = defaultdict(list)
        """Seconds of the steps that were not recorded, by the size of their batch."""
        self.processor_seconds: dict[Hashable, list[float]] = defaultdict(list)
        """Processor time of these steps' own thread: what they take where no other process uses the cores."""
        self.conditions: Conditions | None = None
        """Use of the processor by other processes, from the first step on to the end; None until then, and on CUDA."""
        self.ranks = ProgramRanks()
        self.rank_seconds: Sequence[RankSeconds] = ()
        """Bytes and seconds of one step of each of several ranks; empty before the end, and where a rank told none."""
        self.straggler: int | None = None
        """The rank that the others waited for."""
        self.rank_peaks: Sequence[int] = ()
        """Peak bytes of the ranks that reported them."""
        self._planned_size: Hashable = None
        self._begin = time.perf_counter()
        self._end: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the loop so far, or until its end."""
        return (time.perf_counter() if self._end is None else self._end) - self._begin

    @property
    def typical_size(self) -> Hashable:
        """The most common size of a step; the planned one if it was metered."""
        if self._planned_size in self.step_seconds or self._planned_size in self.recorded:
            return self._planned_size
        return max(self.step_seconds, key=lambda size: len(self.step_seconds[size]), default=None)

    @property
    def measurement(self) -> StepMeasurement | None:
        """The recorded step of the typical size, or the first that was recorded."""
        recorded = self.recorded.get(self.typical_size)
        return recorded or next(iter(self.recorded.values()), None)

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the steps of the typical size, those that were recorded left out."""
        seconds = self.step_seconds.get(self.typical_size)
        return median(seconds) if seconds else None

    @property
    def seconds_alone(self) -> float | None:
        """Processor time of a step where other processes disturbed it; None where none did."""
        seconds = self.processor_seconds.get(self.typical_size)
        return median(seconds) if seconds and self.conditions is not None and self.conditions.busy else None

    @property
    def waiting_share(self) -> float | None:
        """The part of the loop, without the recorded steps, in which it waits for data."""
        whole = self.seconds - self.spent.recorded
        return self.spent.data / whole if self.steps and whole > 0 else None

    def flops_of(self, size: Hashable) -> int | None:
        """FLOPs that were counted for a step of this size: as it ran or, before that, as it was planned."""
        recorded = self.recorded.get(size)
        if recorded is not None:
            return recorded.ledger.flops
        return self.plan.ledger.flops if self.plan is not None and size == self._planned_size else None

    @property
    def mfu(self) -> float | None:
        """Counted FLOPs over seconds times the device's peak, of all steps whose FLOPs were counted, waiting left out.

        FLOPs come from operators, never from 6·N·T, and steps of a size that was not counted are left out.
        """
        if self.plan is None or not self.plan.matmul_peak:
            return None
        known = [(self.flops_of(size), sum(seconds)) for size, seconds in self.step_seconds.items()]
        counted = [
            (flops * len(self.step_seconds[size]), seconds)
            for (flops, seconds), size in zip(known, self.step_seconds, strict=True)
            if flops is not None
        ]
        seconds = sum(each for _, each in counted)
        return sum(flops for flops, _ in counted) / seconds / self.plan.matmul_peak if seconds else None


def program_table(loop: LoopFigures) -> QuantityTable:
    """Rule, count and meter of a watched loop: counted is what was planned, metered what ran."""
    plan, measured = loop.plan, loop.measurement
    ledger = None if plan is None else plan.ledger
    tokens = loop.tokens / loop.steps if loop.steps else 0.0
    rows = [
        QuantityRow("parameters", "count", None, None if ledger is None else ledger.parameters, loop.parameters),
        QuantityRow(
            "FLOPs per step",
            "FLOP",
            training_flops_rule(loop.parameters, tokens) if tokens else None,
            None if ledger is None else ledger.flops,
            None if measured is None else measured.ledger.flops,
            flops_note(ledger or (measured.ledger if measured else None), n_sizes=len(loop.step_seconds)),
        ),
        QuantityRow(
            "peak bytes",
            "bytes",
            adamw_bytes_rule(loop.parameters),
            None if ledger is None else ledger.peak_bytes,
            None if measured is None else measured.peak_bytes,
            "rule 16 bytes per parameter: AdamW in fp32, no activations, no batch",
        ),
        *_fullest_rank(loop),
        QuantityRow(
            "seconds per step",
            "seconds",
            None,
            None if plan is None else plan.price.seconds,
            loop.seconds_per_step,
            "" if plan is None else f"count: within a factor of {plan.price.factor:.2f} in nine cases of ten",
        ),
        *_alone(loop),
        QuantityRow("MFU", "share", None, None if plan is None else plan.mfu, loop.mfu, _MFU_NOTE),
        QuantityRow(
            "waiting for data", "share", None, None if plan is None else 0.0, loop.waiting_share, "of the loop's time"
        ),
    ]
    seconds = loop.seconds if loop.steps else None
    planned = None if plan is None else plan.seconds
    rows.append(QuantityRow("seconds in all", "seconds", None, planned, seconds))
    if plan is not None and plan.site.usd_per_hour is not None:
        usd = plan.site.usd_per_hour
        rows.append(
            QuantityRow("dollars", "USD", None, planned and dollars(planned, usd), seconds and dollars(seconds, usd))
        )
    if plan is not None and plan.site.watts is not None:
        watts, note = plan.site.watts, "at full power, which is not metered"
        counted = planned and kilowatt_hours(planned, watts)
        rows.append(QuantityRow("energy", "kWh", None, counted, seconds and kilowatt_hours(seconds, watts), note))
    return QuantityTable(rows)


def _fullest_rank(loop: LoopFigures) -> list[QuantityRow]:
    """The row of the rank with the most bytes; the row above it is rank 0's."""
    if not loop.rank_peaks:
        return []
    planned = None if loop.plan is None else loop.plan.ledger.peak_bytes
    note = f"of {len(loop.rank_peaks):,} ranks; the count is rank 0's"
    return [QuantityRow("peak bytes, fullest rank", "bytes", None, planned, max(loop.rank_peaks), note)]


def _alone(loop: LoopFigures) -> list[QuantityRow]:
    """The row of a step's seconds without the other processes that disturbed the loop."""
    if loop.seconds_alone is None or loop.conditions is None:
        return []
    note = f"of a busy machine's processor time: while the loop ran, {loop.conditions.describe()}"
    planned = None if loop.plan is None else loop.plan.price.seconds
    return [QuantityRow(ALONE, "seconds", None, planned, loop.seconds_alone, note)]


_MFU_NOTE = "of counted FLOPs in the steps themselves; waiting for data and what is between steps left out"
