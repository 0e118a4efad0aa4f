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

SIZES = (2**12, 2**16, 2**20, 2**23, 2**25)
"""Bytes, from latency to bandwidth."""
SECONDS_PER_POINT = 0.06
MOST_SECONDS = 120


def main() -> None:
    """Measure as the rank that the arguments name: folder, rank, number of ranks, threads."""
    folder, rank, ranks, threads = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(threads)
    limit = datetime.timedelta(seconds=MOST_SECONDS)
    store = FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    contention = _contention(rank)
    collectives = [
        {"operation": name, "data_bytes": size, "seconds": _seconds(make(size, rank, ranks)) / _ROUNDS.get(name, 1)}
        for name, make in _COLLECTIVES.items()
        for size in SIZES
    ]
    if rank == 0:
        atomic_write_bytes(
            folder / "measured.json", msgspec.json.encode({"contention": contention, "collectives": collectives})
        )
    dist.barrier()
    dist.destroy_process_group()


def _contention(rank: int) -> float:
    """How much longer the same work takes while all ranks do it; the same number on all ranks."""
    work = _work()
    alone = torch.zeros((), dtype=torch.float64)
    if rank == 0:
        alone += _median_of(work)
    dist.all_reduce(alone)
    together = torch.tensor(_median_of(work), dtype=torch.float64)
    dist.all_reduce(together)
    return max(1.0, float(together / dist.get_world_size() / alone))


def _work() -> Callable[[], None]:
    """Products and elementwise operations in the proportions of a small model's step."""
    a, b, x = torch.randn(512, 512), torch.randn(512, 512), torch.randn(2**20)

    def work() -> None:
        for _ in range(4):
            torch.mm(a, b)
        torch.nn.functional.silu(x).mul_(x)

    return work


def _median_of(work: Callable[[], None], seconds: float = 8 * SECONDS_PER_POINT) -> float:
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 3:
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _seconds(call: Callable[[], None]) -> float:
    """Seconds of one of several calls in a row; all ranks make the same number of them."""
    call()
    begin = time.perf_counter()
    call()
    once = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    times = max(3, min(200, int(SECONDS_PER_POINT / float(once))))
    dist.barrier()
    taken: list[float] = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _all_reduce(size: int, rank: int, ranks: int) -> Callable[[], None]:
    data = torch.zeros(size // 4)
    return lambda: dist.all_reduce(data) and None


def _all_gather(size: int, rank: int, ranks: int) -> Callable[[], None]:
    own = torch.zeros(size // 4 // ranks)
    whole = torch.zeros(own.numel() * ranks)
    return lambda: dist.all_gather_into_tensor(whole, own) and None


def _reduce_scatter(size: int, rank: int, ranks: int) -> Callable[[], None]:
    own = torch.zeros(size // 4 // ranks)
    whole = torch.zeros(own.numel() * ranks)
    return lambda: dist.reduce_scatter_tensor(own, whole) and None


def _all_to_all(size: int, rank: int, ranks: int) -> Callable[[], None]:
    data = torch.zeros(size // 4 // ranks * ranks)
    received = torch.empty_like(data)
    return lambda: dist.all_to_all_single(received, data) and None


def _send(size: int, rank: int, ranks: int) -> Callable[[], None]:
    """Half of a round between the first two ranks, the others wait."""
    data = torch.zeros(size // 4)

    def there_and_back() -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(data, 1 - rank)
            elif rank == 1 - sender:
                dist.recv(data, 1 - rank)

    return there_and_back


_COLLECTIVES: dict[str, Callable[[int, int, int], Callable[[], None]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}
_ROUNDS = {"send": 2}
"""Messages one after the other in a call, where it is more than one."""
