"""A job of ranks of which one is slowed: rank 0 leaves which rank each way of timing names.

Its arguments are a folder, how many ranks there are, and a free port. The ways are the host's clock, the same told with
clocks that began at different times, and events of a pretended device: gloo makes the host wait where NCCL would make a
stream wait, so that the host's time stands for the stream's.
"""

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from napkin.accounting.collectives import CollectiveClock
from napkin.accounting.rank_seconds import on_one_clock, seconds_of_ranks, step_report
from napkin.distributed.process_group import ProcessGroupRanks
from napkin.distributed.ranks import RankInfo
from reliability.ranks import fork_ranks

SLOW = 1
SLEEP = 0.12


class Event:
    """A CUDA event of a device that works while the host does, and never runs behind it."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1000


def calls(rank: int) -> None:
    """Collectives that are waited for in the call, and later."""
    x = torch.ones(1000)
    for _ in range(3):
        x = x * 1.5
        time.sleep(SLEEP * (rank == SLOW))
        dist.all_reduce(x)
        work = dist.all_reduce(x + 1, async_op=True)
        x = x.exp().log()
        assert work is not None
        work.wait()


class Slow(nn.Module):
    """A layer that takes a while on one rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP * (dist.get_rank() == SLOW))
        return x * 2


MODEL = nn.Sequential(nn.Linear(8, 8), Slow(), nn.Linear(8, 4))


def ddp(rank: int) -> None:
    """Gradients that DDP averages, and waits for in C++."""
    model = DistributedDataParallel(MODEL)
    for _ in range(2):
        model(torch.ones(3, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def work(rank: int) -> None:
    folder, size, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=limit)
    ranks = ProcessGroupRanks(RankInfo(rank, size, rank, size), limit)
    torch.cuda.Event = Event  # pyright: ignore[reportAttributeAccessIssue]
    named: dict[str, Any] = {}
    for case in (calls, ddp):
        case(rank)
        ranks.all_reduce_max(0)
        for device_type in ("cpu", "cuda"):
            clock = CollectiveClock(device_type)
            # Clocks of devices begin when a rank comes to its step.
            time.sleep(0.01 * rank)
            with clock.timing():
                case(rank)
            everyone = ranks.all_gather(step_report(clock, 0))
            if device_type == "cuda":
                named[f"{case.__name__}, events"] = seconds_of_ranks(on_one_clock(everyone), pipelined=False)[1]
                continue
            named[f"{case.__name__}, host"] = seconds_of_ranks(everyone, pipelined=False)[1]
            apart = ranks.all_gather(step_report(clock, 0, offset=1000.0 * rank))
            named[f"{case.__name__}, clocks apart"] = seconds_of_ranks(on_one_clock(apart), pipelined=False)[1]
    if rank == 0:
        (folder / "named.json").write_text(json.dumps(named))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork_ranks(work, int(sys.argv[2]), int(sys.argv[3])))
