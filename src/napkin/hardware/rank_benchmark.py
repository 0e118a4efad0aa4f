"""One of the processes by which `rank_calibration.py` measures the ranks of this machine."""

import datetime
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from napkin.files import atomic_write_bytes
from napkin.hardware.competition import fastest_tenth
from napkin.hardware.timing import event_seconds, processor_seconds, wall_seconds

SIZES = (2**12, 2**16, 2**20, 2**23, 2**25)
"""Bytes, from latency to bandwidth."""
SECONDS_PER_POINT = 0.06
MOST_SECONDS = 120
MOST_SAMPLES = 200


class Request(msgspec.Struct):
    """What a process measures."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...] = SIZES
    seconds: float = SECONDS_PER_POINT
    """Of each operation and size."""
    contention: bool = False
    """Whether to measure also how much longer the same work takes while all ranks do it."""


class Samples(msgspec.Struct):
    """Seconds of one collective, call by call; of each call those of the slowest rank."""

    operation: str
    data_bytes: int
    seconds: list[float]


class Measured(msgspec.Struct):
    """What rank 0 writes."""

    collectives: list[Samples]
    contention: float = 1.0
    """By the clock."""
    processor_contention: float = 1.0
    """By processor time, which does not go on while other processes run, those of the other ranks among them."""


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
    found: list[Samples] = []
    for number, (name, size) in enumerate(points):
        progress(number, len(points))
        size = 4 * ranks * max(1, size // (4 * ranks))
        call = _COLLECTIVES[name](size, rank, ranks, torch.device(device_type))
        seconds = _slowest(_samples(call, request.seconds, clock), device_type)
        found.append(Samples(name, size, [each / _ROUNDS.get(name, 1) for each in seconds]))
    return found


def _contention(rank: int) -> tuple[float, float]:
    """How much longer the same work takes while all ranks do it, by the clock and by processor time; the same numbers
    on all ranks."""
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


def _typical(work: Callable[[], None], seconds: float = 8 * SECONDS_PER_POINT) -> list[float]:
    """The median by the clock, and the fastest tenth of processor time."""
    taken: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 3:
        taken.append(processor_seconds(work))
    clock, processor = zip(*taken, strict=True)
    return [statistics.median(clock), fastest_tenth(processor)]


def _samples(call: Callable[[], None], seconds: float, clock: Callable[[Callable[[], None]], float]) -> list[float]:
    """Seconds of several calls in a row; all ranks make the same number of them."""
    call()
    once = _slowest([clock(call)], "cpu")[0]
    times = max(3, min(MOST_SAMPLES, int(seconds / once)))
    dist.barrier()
    return [clock(call) for _ in range(times)]


def _slowest(seconds: list[float], device_type: str) -> list[float]:
    """Of each call, the largest of all ranks' seconds."""
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
    """Half of a round between the first two ranks, the others wait."""
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
"""Messages one after the other in a call, where it is more than one."""
