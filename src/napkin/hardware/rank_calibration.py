"""How fast the ranks of one machine communicate through gloo, and how much they slow each other down: measured once.

Ranks on one machine share its caches, its memory bandwidth and often its cores: each computes more slowly than it would
alone. Their messages pass through the kernel, whose speed no datasheet tells. Both are measured by as many child
processes as there are ranks, and cached like a `Calibration`.
"""

import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

from napkin.cached_json import cache_path, read_cached, write_cached
from napkin.child_process import failure_of, interrupts_wait, start_python
from napkin.errors import NapkinError
from napkin.files import read_bytes
from napkin.hardware.calibration import Machine, Positive, Size
from napkin.hardware.competition import Watch, fastest_tenth, is_quiet_start
from napkin.hardware.conditions import Conditions
from napkin.hardware.interconnect import Group, Interconnect, Operation


@dataclass(frozen=True)
class CollectiveMeasurement:
    """Seconds of one collective among all ranks; `data_bytes` as `Interconnect.seconds` takes them."""

    operation: Operation
    data_bytes: Size
    seconds: Positive


@dataclass(frozen=True)
class RankCalibration:
    """What so many ranks of this machine, with the threads that `machine` has, take together."""

    machine: Machine
    ranks: Size
    contention: Annotated[float, msgspec.Meta(ge=1)]
    """By which factor a rank computes more slowly while all others compute too."""
    collectives: Annotated[tuple[CollectiveMeasurement, ...], msgspec.Meta(min_length=1)]
    conditions: Conditions | None = None
    """What other processes did meanwhile."""
    version: Literal[2] = 2

    @property
    def disturbed(self) -> bool:
        """Whether other processes used the processor meanwhile, so that collectives may take less."""
        return self.conditions is not None and self.conditions.busy

    @property
    def interconnect(self) -> "MeasuredInterconnect":
        """The seconds of collectives between these ranks."""
        gathers = (each for each in self.collectives if each.operation == "all_gather")
        largest = max(gathers, key=lambda each: (each.data_bytes, each.seconds))
        bandwidth = _sent_fraction(self.ranks) * largest.data_bytes / largest.seconds
        # What a rank sends and receives is copied by its own cores, which do not compute meanwhile.
        return MeasuredInterconnect(bandwidth, bandwidth, self.ranks, 0.0, 0.0, 0.0, 1.0, self.collectives)


@dataclass(frozen=True)
class MeasuredInterconnect(Interconnect):
    """Collectives whose seconds were measured, interpolated between sizes."""

    measured: tuple[CollectiveMeasurement, ...] = ()

    def seconds(self, operation: Operation, data_bytes: float, group: Group) -> float:
        """As `Interconnect.seconds`. Groups of fewer ranks than were measured take less, in proportion to the bytes
        that each rank sends."""
        if group.size == 1 or not data_bytes:
            return 0.0
        points = sorted((each.data_bytes, each.seconds) for each in self.measured if each.operation == operation)
        sizes, seconds = zip(*points, strict=True)
        if data_bytes >= sizes[-1]:
            taken = seconds[-1] * data_bytes / sizes[-1]
        else:
            taken = math.exp(np.interp(math.log(data_bytes), np.log(sizes), np.log(seconds)))
        if operation == "send":
            return taken
        return taken * _sent_fraction(group.size) / _sent_fraction(self.devices_per_node)


def _sent_fraction(ranks: int) -> float:
    """Of the bytes of an all-gather or reduce-scatter, the fraction that each of its ranks sends."""
    return (ranks - 1) / ranks


def ranks_of_this_machine(machine: Machine, ranks: int) -> RankCalibration | None:
    """The cached calibration of `ranks` ranks of this machine, or a new one, which takes some seconds and is cached.

    One that other processes disturbed is measured again by the first process that starts when they have gone.
    Warns, and returns None, where the processes cannot be started or do not reach each other.
    """
    path = cache_path("ranks", (machine, ranks, os.cpu_count()))
    cached = read_cached(path, RankCalibration)
    if (
        cached is not None
        and (cached.machine, cached.ranks) == (machine, ranks)
        and not (cached.disturbed and is_quiet_start(f"{ranks} ranks"))
    ):
        return cached
    try:
        measured = measure_ranks(machine, ranks)
        write_cached(path, measured)
    except (OSError, NapkinError) as error:
        warnings.warn(f"the ranks of this machine could not be measured: {error}", stacklevel=2)
        return None
    return measured


def measure_ranks(machine: Machine, ranks: int) -> RankCalibration:
    """Measure `ranks` ranks, each a child process with as many threads as `machine` has.

    Raises NapkinError where a process fails, OSError where it cannot be started.
    """
    watch, threads = Watch(), ranks * machine.threads
    measured = run_ranks({"operations": get_args(Operation), "contention": True}, ranks, machine.threads)
    conditions = watch.conditions(idle=True, children_threads=threads)
    contention, typical = measured["contention"], statistics.median
    if conditions.busy:
        # More threads than cores take turns, beside other processes and without them.
        contention, typical = measured["processor_contention"] * max(1.0, threads / conditions.cores), fastest_tenth
    collectives = (
        CollectiveMeasurement(each["operation"], each["data_bytes"], typical(each["seconds"]))
        for each in measured["collectives"]
    )
    return RankCalibration(machine, ranks, contention, tuple(collectives), conditions)


def run_ranks(request: Mapping[str, Any], ranks: int, threads: int) -> dict[str, Any]:
    """What `ranks` child processes on this machine measure together: the request is a `Request` of rank_benchmark.py,
    the answer a `Measured`.

    Raises NapkinError where a process fails, OSError where it cannot be started; no process is left behind.
    """
    code = "from napkin.hardware.rank_benchmark import main; main()"
    text = msgspec.json.encode(request).decode()
    processes = []
    with tempfile.TemporaryDirectory(prefix="napkin-ranks-") as folder:
        try:
            with interrupts_wait():
                for rank in range(ranks):
                    arguments = (folder, str(rank), str(ranks), str(threads), text)
                    processes.append(start_python(code, *arguments, OMP_NUM_THREADS=str(threads)))
            failures = [failure for failure in map(failure_of, processes) if failure]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failures:
            raise NapkinError(failures[0])
        return msgspec.json.decode(read_bytes(Path(folder) / "measured.json"), type=dict)
