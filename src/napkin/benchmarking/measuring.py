"""Measures cases one after the other: each is counted first, refused where it cannot fit, and then timed."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from napkin.accounting.ledger import Ledger
from napkin.benchmarking.case import Case, Target
from napkin.benchmarking.conditions import Waited
from napkin.benchmarking.intervals import Interval, median_interval, ratio_interval
from napkin.benchmarking.sampling import SHORTEST_SAMPLE, Clock, Sampling, device_clock, evictor, sample_in_turns
from napkin.benchmarking.subject import timed_pass
from napkin.benchmarking.work import Work, work_of
from napkin.errors import first_line, is_out_of_memory
from napkin.hardware.ceilings import Ceilings
from napkin.units import format_bytes, format_seconds

Progress = Callable[[int, int, str], None]
_LARGE_BYTES = 2**28


@dataclass(frozen=True)
class Limits:
    """Limits of a case; one that would take more by plan is not run."""

    bytes: int
    seconds: float = 60.0
    """Seconds of a case with its warm-up and its fewest samples."""


@dataclass(frozen=True)
class Row:
    """A case and what was found."""

    case: Case
    work: Work
    samples: tuple[float, ...] = ()
    """Seconds; none where the case was not run."""
    refused: str = ""
    """Why it was not."""
    against: str = ""
    """The form that it was timed in turns with."""
    ratio: Interval | None = None
    """Ratio of its seconds to those of that form, in pairs."""
    waiting_share: float | None = None
    """Fraction of the time in which threads waited for a core that others used; None where that is not known."""

    @property
    def seconds(self) -> Interval | None:
        """The median of the samples."""
        return median_interval(self.samples) if self.samples else None

    @property
    def roof_share(self) -> float | None:
        """Fraction of the machine's roof that the median reaches."""
        return None if self.seconds is None else self.work.roof_seconds / self.seconds.median


class Measuring:
    """Measures the cases of one target on this machine."""

    def __init__(
        self,
        target: Target,
        device_type: str,
        ceilings: Ceilings,
        limits: Limits,
        *,
        seconds: float = 0.5,
        clock: Clock | None = None,
    ) -> None:
        self.target, self.ceilings, self.limits = target, ceilings, limits
        self.device_type = device_type
        self.clock = clock or device_clock(device_type)
        self.sampling = Sampling(seconds=seconds, shortest=SHORTEST_SAMPLE[device_type])
        self._ledgers: dict[tuple, Ledger] = {}
        self._evict: Callable[[], object] | None = None

    def rows(
        self, cases: Sequence[Case], against: tuple[str, bool] | None = None, *, progress: Progress = lambda *_: None
    ) -> Iterator[Row]:
        """One row for each case, in their order; those that cannot be run say why.

        `against` is a form and whether it is compiled: other forms are timed in turns with it, sample by sample.
        """
        for number, case in enumerate(cases):
            progress(number, len(cases), case.name)
            other = None if against is None else replace(case, form=against[0], compiled=against[1])
            yield self._row(case, None if other == case else other)

    def _row(self, case: Case, other: Case | None) -> Row:
        both = [each for each in (case, other) if each is not None]
        works = [self._work(each) for each in both]
        row = Row(case, works[0], against=other.name if other else "")
        refused = self._refusal(works)
        if refused:
            return replace(row, refused=refused)
        try:
            waited = Waited()
            first, *rest = self._samples(both, waited)
        except TorchDynamoException as error:
            return replace(row, refused=f"cannot be compiled: {first_line(error)}")
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return replace(row, refused=f"out of memory: {first_line(error)}")
        finally:
            if self.device_type == "cuda" or works[0].peak_bytes > _LARGE_BYTES:
                # What compiled code and autograd hold in circles would be there beside the next case.
                gc.collect()
            if self.device_type == "cuda":
                torch.cuda.empty_cache()
        ratio = ratio_interval(first, rest[0]) if rest else None
        return replace(row, samples=tuple(first), ratio=ratio, waiting_share=waited.share)

    def _work(self, case: Case) -> Work:
        counted = (tuple(case.shape.items()), case.form, case.precision, case.timed == "step")
        if counted not in self._ledgers:
            self._ledgers[counted] = self.target.ledger(case)
        return work_of(self._ledgers[counted], case.timed, self.ceilings)

    def _refusal(self, works: Sequence[Work]) -> str:
        peak = sum(work.peak_bytes for work in works)
        if peak > self.limits.bytes:
            return f"out of memory by plan: {format_bytes(peak)} of {format_bytes(self.limits.bytes)}"
        calls = self.sampling.least + 2
        seconds = calls * sum(work.planned_seconds for work in works)
        if seconds > self.limits.seconds:
            return f"too long by plan: {format_seconds(seconds)} for {calls} calls"
        return ""

    def _samples(self, cases: Sequence[Case], waited: Waited) -> list[list[float]]:
        if cases[0].cold and self._evict is None:
            self._evict = evictor(self.device_type)
        sampling = replace(self.sampling, evict=self._evict if cases[0].cold else None)
        compiled = any(case.compiled for case in cases)
        if compiled:
            # Of one function only so many shapes are compiled; from then on it would run uncompiled.
            torch.compiler.reset()
        timed = [timed_pass(self.target.subject(case), case.timed) for case in cases]
        if compiled:
            # So that compiling is not watched: it takes longer than what is timed.
            for each in timed:
                each.run()
        with waited:
            return sample_in_turns(timed, self.clock, sampling)


def row_values(row: Row) -> dict[str, Any]:
    """A row for programs: units are seconds, FLOPs and bytes."""
    case, seconds, ratio = row.case, row.seconds, row.ratio
    values: dict[str, Any] = {
        "shape": dict(case.shape),
        "form": case.form,
        "compiled": case.compiled,
        "precision": case.precision.name,
        "pass": case.timed,
        "cache": "cold" if case.cold else "warm",
        "flops": row.work.flops,
        "bytes": row.work.bytes,
        "peak_bytes": row.work.peak_bytes,
        "roof_seconds": row.work.roof_seconds,
        "bound": row.work.bound,
        "planned_seconds": row.work.planned_seconds,
        "refused": row.refused or None,
        "waiting_share": row.waiting_share,
        "samples": row.samples,
    }
    if seconds is not None:
        values |= {
            "seconds": vars(seconds),
            "flops_per_second": row.work.flops / seconds.median,
            "bytes_per_second": row.work.bytes / seconds.median,
            "roof_share": row.roof_share,
        }
    if ratio is not None:
        values |= {"against": row.against, "ratio": vars(ratio)}
    return values
