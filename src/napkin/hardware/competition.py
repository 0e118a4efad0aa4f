"""Competition for the processor: how much of it other processes take during a measurement, and an estimate of the time
without them.

Where another process wants the same core, the clock counts both; the processor time of a thread does not. So on a busy
machine a sample is the processor time of its busiest thread, and the fastest tenth of many short samples counts.
Processor time does not reveal three things: memory bandwidth and caches that others use, the other hardware thread of a
core, a lower clock frequency. What was timed on a busy machine is therefore an upper bound.
"""

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

from napkin.hardware.conditions import Conditions
from napkin.hardware.host import seconds_waited, usable_cores
from napkin.hardware.timing import processor_seconds, wall_seconds

WINDOW_SECONDS = 0.25
"""The shortest time over which the system's clocks, which tick every 10 ms, say how busy it is."""
SHORTEST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.1, 10.0
AGREED = 1.05
"""The fastest samples agree where a tenth of them, and at least two, are within this factor."""


class Watch:
    """Watches the processor from when it is made."""

    def __init__(self) -> None:
        self._begin = _Reading.now()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin.at

    def conditions(
        self, *, idle: bool = False, lost: float | None = None, children_threads: int | None = None
    ) -> Conditions:
        """The conditions since this object was made.

        Args:
            idle: whether this process's threads were not meant to run all the time.
            lost: the fraction of the clock in which the busiest thread did not run, if it is known.
            children_threads: the threads of child processes that did the work and have ended since; None is this one.
        """
        begin, end = self._begin, _Reading.now()
        seconds, cores = max(1e-9, end.at - begin.at), usable_cores()
        threads = children_threads or torch.get_num_threads()
        own = end.own - begin.own + (end.children - begin.children if children_threads else 0.0)
        stolen = max(0.0, end.stolen - begin.stolen)
        others = max(0.0, end.busy - begin.busy - own) + stolen
        waited = None
        if not idle and begin.waited is not None and end.waited is not None:
            waited = max(0.0, end.waited - begin.waited) / seconds / threads
        return Conditions(cores, threads, others / seconds, stolen / seconds, waited, lost)


def is_busy_now() -> bool:
    """True if other processes use the processor: since the last call or the start of the program, if that is long
    enough ago; otherwise this watches for a moment."""
    global _last_watch
    watch = _last_watch
    if watch.seconds > LONGEST_LOOK_SECONDS:
        watch = Watch()
    time.sleep(max(0.0, SHORTEST_LOOK_SECONDS - watch.seconds))
    busy = watch.conditions(idle=True).busy
    _last_watch = Watch()

    return busy


def is_quiet_start(what: str) -> bool:
    """True if this process asks for the first time, for `what`, and no other process uses the processor."""
    if what in _asked:
        return False
    _asked.add(what)
    return not is_busy_now()


@dataclass(frozen=True, slots=True)
class _Reading:
    """The system's clocks at one moment, in seconds of a core."""

    at: float
    busy: float
    stolen: float
    own: float
    children: float
    """Processor time of child processes that have ended."""
    waited: float | None

    @classmethod
    def now(cls) -> "_Reading":
        busy = stolen = 0.0
        # A container may hide them.
        with suppress(OSError, RuntimeError, NotImplementedError, psutil.Error):
            for core in _own_cores(psutil.cpu_times(percpu=True)):
                stolen += getattr(core, "steal", 0.0)
                busy += core.user + core.system + sum(getattr(core, name, 0.0) for name in ("nice", "irq", "softirq"))
        children = os.times().children_user + os.times().children_system
        return cls(time.perf_counter(), busy, stolen, time.process_time(), children, seconds_waited())


def _own_cores(cores: Sequence) -> Sequence:
    if sys.platform != "linux" or len(cores) != os.cpu_count():
        return cores
    return [cores[number] for number in os.sched_getaffinity(0) if number < len(cores)]


_last_watch = Watch()
_asked: set[str] = set()


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of a call: by the clock, and those in which its busiest thread ran."""

    clock: float
    processor: float
    window: int
    """Number of the sampler's window in which the sample was taken."""


class Sampler:
    """Times calls, and finds out in windows of a quarter of a second whether other processes disturb them. While they
    do, waiting threads of this process sleep instead of spinning, since spinning counts as processor time. Use it as a
    context manager.
    """

    def __init__(self, device_type: str = "cpu", *, window: float = WINDOW_SECONDS) -> None:
        """`window` is the length of a window in seconds."""
        self._device_type, self._window_seconds = device_type, window
        self._whole = self._watch = Watch()
        self._busy: list[bool] = []
        self._team: _SleepingTeam | None = None
        self._clock = self._processor = 0.0
        self._lost: list[float] = [0.0, 0.0]

    def __enter__(self) -> "Sampler":
        if self._device_type == "cpu":
            self._sleep_if(is_busy_now())
        self._whole = self._watch = Watch()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_window()
        self._sleep_if(False)

    def sample(self, call: Callable[[], object], calls: int = 1) -> Sample:
        """A sample: the time of one of `calls` consecutive calls."""
        if self._device_type != "cpu":
            taken = wall_seconds(call, self._device_type, calls)
            return Sample(taken, taken, 0)
        if self._watch.seconds > self._window_seconds:
            self._close_window()
        clock, processor = processor_seconds(call, calls)
        self._clock += clock * calls
        self._processor += processor * calls
        return Sample(clock, processor, len(self._busy))

    @property
    def busy(self) -> bool:
        """True if other processes disturbed the samples of the window before."""
        return self._team is not None

    def conditions(self) -> Conditions | None:
        """The use of the processor from the beginning to now; None for a device that other processes do not share."""
        if self._device_type != "cpu":
            return None
        clock, processor = self._lost[0] + self._clock, self._lost[1] + self._processor
        return self._whole.conditions(lost=1 - processor / clock if clock else None)

    def undisturbed(self, samples: Iterable[Sample]) -> list[float]:
        """Seconds of each sample without other processes: where it was disturbed, those of its busiest thread."""
        return [sample.processor if self._was_busy(sample) else sample.clock for sample in samples]

    def seconds(self, samples: Sequence[Sample]) -> float:
        """Seconds of a call of which there are several samples: the median of those that were not disturbed; where
        most were, the fastest tenth of their processor time."""
        quiet = [sample.clock for sample in samples if not self._was_busy(sample)]
        if 2 * len(quiet) >= len(samples):
            return statistics.median(quiet)
        return fastest_tenth([sample.processor for sample in samples])

    def fastest(self, samples: Sequence[Sample]) -> float:
        """The fastest of the samples, of undisturbed ones if there are any."""
        quiet = [sample.clock for sample in samples if not self._was_busy(sample)]
        return min(quiet) if quiet else fastest_tenth([sample.processor for sample in samples])

    def _was_busy(self, sample: Sample) -> bool:
        return self._busy[sample.window] if sample.window < len(self._busy) else self.busy

    def _close_window(self) -> None:
        if self._device_type != "cpu":
            return
        lost = 1 - self._processor / self._clock if self._clock else None
        self._lost = [self._lost[0] + self._clock, self._lost[1] + self._processor]
        self._clock = self._processor = 0.0
        self._busy.append(self._watch.conditions(lost=lost).busy)
        self._watch = Watch()
        self._sleep_if(self._busy[-1])

    def _sleep_if(self, busy: bool) -> None:
        if busy and self._team is None:
            self._team = _SleepingTeam()
        elif not busy and self._team is not None:
            self._team.end()
            self._team = None


def fastest_tenth(seconds: Sequence[float]) -> float:
    """The slowest of the fastest tenth: of fewer than twenty samples, the fastest."""
    return sorted(seconds)[max(0, len(seconds) // 10 - 1)]


def agree(seconds: Sequence[float]) -> bool:
    """True if the fastest tenth of the samples, and at least two, are equal but for a twentieth."""
    ordered = sorted(seconds)
    return len(ordered) > 2 and ordered[max(1, len(ordered) // 10 - 1)] <= AGREED * ordered[0]


class _SleepingTeam:
    """A second team of OpenMP threads, which sleeps: while there are more threads than cores, GNU's library lets a
    thread that waits for others sleep almost at once. That is what its documentation says of GOMP_SPINCOUNT."""

    def __init__(self) -> None:
        self._ended, started = threading.Event(), threading.Event()

        def sleep() -> None:
            if torch.get_num_threads() > 1:
                # As many parts as threads: torch divides work among threads from 32,768 elements on.
                torch.zeros(torch.get_num_threads() * 2**15).add_(1)
            started.set()
            self._ended.wait()

        self._thread = threading.Thread(target=sleep, name="sleeping-team", daemon=True)
        self._thread.start()
        started.wait()

    def end(self) -> None:
        """End its threads."""
        self._ended.set()
        self._thread.join()
