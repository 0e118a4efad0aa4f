"""A job of ranks whose loops are watched. Its arguments are a folder, the number of ranks, and a free port.

Each rank writes what it knows at the end of each case to CASE-RANK.json; rank 0's runs are in the folder.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import napkin
from reliability.ranks import fork_ranks

WIDTH = 64
TIMED_STEP = 3
"""The one whose collectives are timed, after the recorded one."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 64))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def come_second(rank: int, begun: Path) -> None:
    """Hold rank 1 up for long after rank 0's step has begun, which writes a run's files before it and may be late."""
    if rank == 0:
        begun.touch()
        return
    for _ in range(6000):
        if begun.exists():
            break
        time.sleep(0.01)
    time.sleep(2)


def train(case: str, rank: int, folder: Path, *, watches: bool = True) -> Any:
    module: nn.Module = model()
    if case != "fsdp":
        module = DistributedDataParallel(module)
    elif case == "fsdp":
        for part in (module[1], module[3]):  # pyright: ignore[reportIndexIssue]
            fully_shard(part)
        fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters())
    losses = []
    generator = torch.Generator().manual_seed(rank)
    rows = 4 * (1 + rank) if case == "ddp" else 4
    batches = [torch.randint(0, 64, (rows, 16), generator=generator) for _ in range(6)]
    if not watches:
        return [float(train_step(module, optimizer, ids)) for ids in batches]
    with napkin.watch(module, optimizer, run=folder / case, on="H100") as watched:
        watched.plan_step(train_step, batches[0])
        for number, ids in enumerate(watched.data(batches)):
            with watched.step(tokens=ids.numel()):
                if case == "killed" and rank == 1 and number == 4:
                    os._exit(0)
                if case == "slow" and number == TIMED_STEP:
                    come_second(rank, folder / "rank 0 has begun")
                losses.append(float(train_step(module, optimizer, ids)))
    found, plan = watched.measurement, watched.plan
    return {
        "losses": losses,
        "peak": found and found.peak_bytes,
        "flops": found and found.ledger.flops,
        "planned peak": plan and plan.ledger.peak_bytes,
        "planned flops": plan and plan.ledger.flops,
        "collectives": plan and len([row for row in plan.ledger.rows if row.collective]),
        "obstacle": watched.obstacle,
        "ranks": [[each.rank, each.peak_bytes, each.exposed_seconds] for each in watched.rank_seconds],
        "straggler": watched.straggler,
        "run": watched.run and watched.run.name,
        "verdict": watched.verdict(),
    }


def work(rank: int) -> None:
    folder, size, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    for case in ("ddp", "fsdp", "slow"):
        alone = train(case, rank, folder, watches=False) if case != "slow" else None
        (folder / f"{case}-{rank}.json").write_text(json.dumps({**train(case, rank, folder), "alone": alone}))
    try:
        train("killed", rank, folder)
    except RuntimeError as error:  # of gloo, whose connection is closed
        (folder / f"killed-{rank}.json").write_text(json.dumps(str(error)))


if __name__ == "__main__":
    sys.exit(fork_ranks(work, int(sys.argv[2]), int(sys.argv[3])))
