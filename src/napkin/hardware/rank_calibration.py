"""Speed of communication through gloo among the ranks of one machine, and how much they slow each other down, measured
once.

Ranks on one machine share its caches, its memory bandwidth and often its cores: each computes more slowly than it would
alone. Their messages pass through the kernel, whose speed no datasheet tells. Both are measured by as many child
processes as there are ranks, and cached like a `Calibration`.

This file is also the program of those processes.
"""

import datetime
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from napkin.child_process import failure_of, interrupts_wait, start_python
from napkin.errors import NapkinError
from napkin.files import atomic_write_bytes, read_bytes
from napkin.hardware.calibration import Machine, Positive, Size
from napkin.hardware.cluster import Group, Interconnect, Operation
from napkin.hardware.competition import Watch, fastest_tenth, is_quiet_start
from napkin.hardware.conditions import Conditions
from napkin.hardware.timing import event_seconds, processor_seconds, wall_seconds
from napkin.json_files import cache_path, read_cached, write_cached


@dataclass(frozen=True)
class CollectiveMeasurement:
    """Seconds of one collective among all ranks; `data_bytes` as `Interconnect.seconds` takes them."""

    operation: Operation
    data_bytes: Size
    seconds: Positive


@dataclass(frozen=True)
class RankCalibration:
    """The seconds of collectives and the slowdown of so many ranks of this machine, with the threads that `machine`
    has."""

    machine: Machine
    ranks: Size
    contention: Annotated[float, msgspec.Meta(ge=1)]
    """Factor by which a rank computes more slowly while all others compute too."""
    collectives: Annotated[tuple[CollectiveMeasurement, ...], msgspec.Meta(min_length=1)]
    conditions: Conditions | None = None
    """Use of the processor by other processes meanwhile."""
    version: Literal[2] = 2

    @property
    def disturbed(self) -> bool:
        """True if other processes used the processor meanwhile, so that collectives may take less."""
        return self.conditions is not None and self.conditions.busy

    @property
    def interconnect(self) -> "MeasuredInterconnect":
        """The seconds of collectives between these ranks."""
        gathers = (each for each in self.collectives if each.operation == "all_gather")
        largest = max(gathers, key=lambda each: (each.data_bytes, each.seconds))
        bandwidth = _sent_fraction(self.ranks) * largest.data_bytes / largest.seconds
        # A rank's own cores copy what it sends and receives, and do not compute meanwhile.
        return MeasuredInterconnect(bandwidth, bandwidth, self.ranks, 0.0, 0.0, 0.0, 1.0, self.collectives)


@dataclass(frozen=True)
class MeasuredInterconnect(Interconnect):
    """Collectives whose seconds were measured, interpolated between sizes."""

    measured: tuple[CollectiveMeasurement, ...] = ()

    def seconds(self, operation: Operation, data_bytes: float, group: Group) -> float:
        """Seconds as in `Interconnect.seconds`. Groups of fewer ranks than were measured take less, in proportion to
        the bytes that each rank sends."""
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
    """The fraction of the bytes of an all-gather or reduce-scatter that each of its ranks sends."""
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
        # With more threads than cores, threads take turns even on a quiet machine.
        contention, typical = measured["processor_contention"] * max(1.0, threads / conditions.cores), fastest_tenth
    collectives = (
        CollectiveMeasurement(each["operation"], each["data_bytes"], typical(each["seconds"]))
        for each in measured["collectives"]
    )
    return RankCalibration(machine, ranks, contention, tuple(collectives), conditions)


def run_ranks(request: Mapping[str, Any], ranks: int, threads: int) -> dict[str, Any]:
    """Measure in `ranks` child processes on this machine: the request is a `Request`, the answer a `Measured`.

    Raises NapkinError where a process fails, OSError where it cannot be started; no process is left behind.
    """
    code = "from napkin.hardware.rank_calibration import main; main()"
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


SIZES = (2**12, 2**16, 2**20, 2**23, 2**25)
"""Bytes, from latency to bandwidth."""
SECONDS_PER_POINT = 0.06
MOST_SECONDS = 120
MOST_SAMPLES = 200


class Request(msgspec.Struct):
    """The request of a measurement to a process."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...] = SIZES
    seconds: float = SECONDS_PER_POINT
    """Seconds for each operation and size."""
    contention: bool = False
    """True to measure also how much longer the same work takes while all ranks do it."""


class Samples(msgspec.Struct):
    """Seconds of one collective, call by call; of each call those of the slowest rank."""

    operation: str
    data_bytes: int
    seconds: list[float]


class Measured(msgspec.Struct):
    """The answer that rank 0 writes."""

    collectives: list[Samples]
    contention: float = 1.0
    """Slowdown by the clock."""
    processor_contention: float = 1.0
    """Slowdown by processor time, which does not go on while other processes run, those of the other ranks among
    them."""


def main() -> None:
    """Measure as the rank that the arguments name: folder, rank, number of ranks, threads, the request as JSON."""
    folder, rank, ranks, threads = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    request = msgspec.json.decode(sys.argv[5], type=Request)
    torch.set_num_threads(threads)
    limit = datetime.timedelta(seconds=MOST_SECONDS)
    store = FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    contention = _contention(rank) if request.contention else (1.0, 1.0)
    measured = Measured(collective_samples(request, rank, ranks), *contention)
    if rank == 0:
        atomic_write_bytes(folder / "measured.json", msgspec.json.encode(measured))
    dist.barrier()
    dist.destroy_process_group()


def collective_samples(
    request: Request,
    rank: int,
    ranks: int,
    *,
    device_type: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Samples]:
    """The requested samples, on every rank of the process group that this process is in.

    Sizes are rounded down to a whole number of floats for each rank, at least one.
    """
    clock = event_seconds if device_type == "cuda" else lambda call: wall_seconds(call, "cpu")
    points = [(name, size) for name in request.operations for size in request.sizes]
    samples: list[Samples] = []
    for number, (name, size) in enumerate(points):
        progress(number, len(points))
        size = 4 * ranks * max(1, size // (4 * ranks))
        call = _COLLECTIVES[name](size, rank, ranks, torch.device(device_type))
        seconds = _slowest(_samples(call, request.seconds, clock), device_type)
        samples.append(Samples(name, size, [each / _ROUNDS.get(name, 1) for each in seconds]))
    return samples


def _contention(rank: int) -> tuple[float, float]:
    """The slowdown of the same work while all ranks do it, by the clock and by processor time; the same numbers on all
    ranks."""
    work = _work()
    alone = torch.zeros(2, dtype=torch.float64)
    if rank == 0:
        alone += torch.tensor(_typical(work))
    dist.all_reduce(alone)
    together = torch.tensor(_typical(work), dtype=torch.float64)
    dist.all_reduce(together)
    clock, processor = (together / dist.get_world_size() / alone).clamp(min=1.0).tolist()
    return clock, processor


def _work() -> Callable[[], None]:
    """Products and elementwise operations in the proportions of a small model's step."""
    a, b, x = torch.randn(512, 512), torch.randn(512, 512), torch.randn(2**20)

    def work() -> None:
        for _ in range(4):
            torch.mm(a, b)
        torch.nn.functional.silu(x).mul_(x)

    return work


def _typical(work: Callable[[], None]) -> list[float]:
    """The median by the clock, and the fastest tenth of processor time."""
    taken: list[tuple[float, float]] = []
    end = time.perf_counter() + 8 * SECONDS_PER_POINT
    while time.perf_counter() < end or len(taken) < 3:
        taken.append(processor_seconds(work))
    clock, processor = zip(*taken, strict=True)
    return [statistics.median(clock), fastest_tenth(processor)]


def _samples(call: Callable[[], None], seconds: float, clock: Callable[[Callable[[], None]], float]) -> list[float]:
    """Seconds of several consecutive calls; all ranks make the same number of calls."""
    call()
    once = _slowest([clock(call)], "cpu")[0]
    times = max(3, min(MOST_SAMPLES, int(seconds / once)))
    dist.barrier()
    return [clock(call) for _ in range(times)]


def _slowest(seconds: list[float], device_type: str) -> list[float]:
    """The largest of all ranks' seconds for each call."""
    largest = torch.tensor(seconds, dtype=torch.float64, device=device_type)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def _all_reduce(size: int, rank: int, ranks: int, device: torch.device) -> Callable[[], None]:
    data = torch.zeros(size // 4, device=device)
    return lambda: dist.all_reduce(data) and None


def _all_gather(size: int, rank: int, ranks: int, device: torch.device) -> Callable[[], None]:
    own = torch.zeros(size // 4 // ranks, device=device)
    whole = torch.zeros(own.numel() * ranks, device=device)
    return lambda: dist.all_gather_single(whole, own) and None


def _reduce_scatter(size: int, rank: int, ranks: int, device: torch.device) -> Callable[[], None]:
    own = torch.zeros(size // 4 // ranks, device=device)
    whole = torch.zeros(own.numel() * ranks, device=device)
    return lambda: dist.reduce_scatter_single(own, whole) and None


def _all_to_all(size: int, rank: int, ranks: int, device: torch.device) -> Callable[[], None]:
    data = torch.zeros(size // 4, device=device)
    received = torch.empty_like(data)
    return lambda: dist.all_to_all_single(received, data) and None


def _send(size: int, rank: int, ranks: int, device: torch.device) -> Callable[[], None]:
    """Half of a round trip between the first two ranks, while the others wait."""
    data = torch.zeros(size // 4, device=device)

    def there_and_back() -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(data, 1 - rank)
            elif rank == 1 - sender:
                dist.recv(data, 1 - rank)

    return there_and_back


_COLLECTIVES: dict[str, Callable[[int, int, int, torch.device], Callable[[], None]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}
_ROUNDS = {"send": 2}
"""Number of consecutive messages in a call, where it is more than one."""
