"""Measures cases one after the other: each is counted first, refused where it cannot fit, and then timed.

Beside the seconds stand the conditions in which they were measured: clocks, load of other programs, waiting for a core.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import psutil
import torch
from torch._dynamo.exc import TorchDynamoException

from napkin.accounting.ledger import Ledger
from napkin.benchmarking.case import Case, Target, Work, timed_pass, work_of
from napkin.child_process import run_program
from napkin.errors import first_line, is_out_of_memory
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.host import seconds_waited
from napkin.hardware.sampling import (
    SHORTEST_SAMPLE,
    Clock,
    Interval,
    Sampling,
    device_clock,
    evictor,
    median_interval,
    ratio_interval,
    sample_in_turns,
)
from napkin.machine_code.processor import cpu_name
from napkin.units import format_bytes, format_seconds

Progress = Callable[[int, int, str], None]
_LARGE_BYTES = 2**28
_NVIDIA_SMI = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,utilization.gpu"


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
    """Ratio of its seconds to those of the form in `against`, in pairs."""
    waiting_share: float | None = None
    """Fraction of the time in which threads waited for a core that others used; None where that is not known."""

    @property
    def seconds(self) -> Interval | None:
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
        peak, calls = sum(work.peak_bytes for work in works), self.sampling.least + 2
        if peak > self.limits.bytes:
            needed = f"{format_bytes(peak)} of {format_bytes(self.limits.bytes)}"
            return replace(row, refused=f"out of memory by plan: {needed}")
        seconds = calls * sum(work.planned_seconds for work in works)
        if seconds > self.limits.seconds:
            return replace(row, refused=f"too long by plan: {format_seconds(seconds)} for {calls} calls")
        waited = Waited()
        try:
            first, *rest = self._samples(both, waited)
        except TorchDynamoException as error:
            return replace(row, refused=f"cannot be compiled: {first_line(error)}")
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return replace(row, refused=f"out of memory: {first_line(error)}")
        finally:
            if self.device_type == "cuda" or works[0].peak_bytes > _LARGE_BYTES:
                # Reference cycles of compiled code and autograd would otherwise stay alive during the next case.
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

    def _samples(self, cases: Sequence[Case], waited: "Waited") -> list[list[float]]:
        if cases[0].cold and self._evict is None:
            self._evict = evictor(self.device_type)
        sampling = replace(self.sampling, evict=self._evict if cases[0].cold else None)
        compiled = any(case.compiled for case in cases)
        if compiled:
            # torch.compile compiles a function for a limited number of shapes; further ones would run uncompiled.
            torch.compiler.reset()
        timed = [timed_pass(self.target.subject(case), case.timed) for case in cases]
        if compiled:
            # Compiling is left out of the watched time: it takes longer than what is timed.
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
        **vars(row.work),
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


class Waited:
    """Watches, while a block runs, for how long this process's threads were ready to run and had no core."""

    def __init__(self) -> None:
        self.share: float | None = None
        """Fraction of the time, of one thread; None before the end, and where the system does not tell."""

    def __enter__(self) -> "Waited":
        self._begin, self._before = time.perf_counter(), seconds_waited()
        return self

    def __exit__(self, *_: object) -> None:
        seconds, after = time.perf_counter() - self._begin, seconds_waited()
        if self._before is not None and after is not None and seconds:
            self.share = max(0.0, after - self._before) / seconds / torch.get_num_threads()


class Conditions:
    """Watches the machine from when it is made until `values` is called."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.measured_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.before = moment(device_type)

    def values(self) -> dict[str, Any]:
        return {
            "measured_at": self.measured_at,
            "device": torch.cuda.get_device_name() if self.device_type == "cuda" else cpu_name(),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "before": self.before,
            "after": moment(self.device_type),
        }


def moment(device_type: str) -> dict[str, Any]:
    """The state of the machine now: the mean clock of its cores, the runnable threads in the last minute and, by their
    names, the fields of nvidia-smi; None where the system does not tell."""
    readings: dict[str, Any] = dict.fromkeys(("megahertz", "load", "gpu"))
    with contextlib.suppress(OSError, NotImplementedError):
        clock = psutil.cpu_freq()
        readings["megahertz"] = clock.current if clock else None
    with contextlib.suppress(OSError):
        readings["load"] = psutil.getloadavg()[0]
    if device_type == "cuda":
        index = os.environ.get("LOCAL_RANK", "0")
        command = ["nvidia-smi", f"--query-gpu={_NVIDIA_SMI}", "--format=csv,noheader", f"--id={index}"]
        with contextlib.suppress(OSError):
            answer = run_program(command, most_seconds=10)
            values = [value.strip() for value in answer.stdout.decode(errors="replace").split(",")]
            if answer.returncode == 0:
                readings["gpu"] = dict(zip(_NVIDIA_SMI.split(","), values, strict=False))
    return readings
