"""Seconds of a step on several ranks of this machine, planned and then measured, over eight layouts.

    python benchmarks/rank_seconds.py [--ranks 2]

Each layout is planned as `napkin train` plans it, by rank 0 while the others wait, and then trained. Beside the plan
stands what users have otherwise: the step of one process, planned, divided by the number of ranks. The table is also
written to benchmarks/results/.
"""

import argparse
import dataclasses
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import torch

from napkin.distributed.joining import join_ranks
from napkin.distributed.ranks import Ranks, rank_info_of
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan_resolved, resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig
from napkin.train_step.step import build_train_state
from result_files import write_result
from turns import BRACKETS, spread

TIMED_STEPS = 8
MODEL = ModelConfig(4096, 256, d_model=256, n_layers=4, n_heads=4)
TRAINING = TrainingConfig(batch_size=16, precision="fp32", device="cpu", threads=1)


def layouts(ranks: int) -> dict[str, Recipe]:
    """Eight ways to divide the same step among ranks."""

    def recipe(layout: ParallelismConfig | None = None, **training: Any) -> Recipe:
        changed = dataclasses.replace(TRAINING, **training)
        return Recipe(model=MODEL, training=changed, parallelism=layout or ParallelismConfig())

    pipeline = ParallelismConfig(pipeline=ranks)
    return {
        "ddp": recipe(),
        "ddp, 2 micro-batches": recipe(micro_batch_size=16 // ranks // 2),
        "fsdp": recipe(parallelism="fsdp"),
        "fsdp, recomputed": recipe(parallelism="fsdp", recompute="full"),
        "tensor": recipe(ParallelismConfig(tensor=ranks)),
        "pipeline, gpipe": recipe(dataclasses.replace(pipeline, schedule="gpipe"), micro_batch_size=4),
        "pipeline, 1f1b": recipe(pipeline, micro_batch_size=4),
        "context": recipe(ParallelismConfig(context=ranks)),
    }


def compare(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Planned and measured seconds of a step; all ranks call it."""
    machine = ThisMachine(ranks, device="cpu")
    resolved = resolve(recipe, machine)

    def planned() -> list[float]:
        seconds = plan_resolved(resolved, machine).seconds_per_step
        alone = ThisMachine(device="cpu")
        one = dataclasses.replace(recipe, parallelism=ParallelismConfig())
        return [seconds, plan_resolved(resolve(one, alone), alone).seconds_per_step / ranks.world_size]

    seconds, divided = ranks.broadcast_from_zero(planned)
    torch.set_num_threads(1)
    train_state = build_train_state(resolved, ranks)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(MODEL.vocab_size, (TRAINING.batch_size, MODEL.context_length), generator=draw)
    own = tokens[train_state.parallel_model.rows(TRAINING.batch_size)]
    taken: list[float] = []
    for number in range(2 + TIMED_STEPS):
        begin = time.perf_counter()
        train_state.step(number, own, own)
        taken.append(time.perf_counter() - begin)
    return {"planned": seconds, "divided": divided, "measured": taken[2:]}


def main(n_ranks: int) -> None:
    """Compare every layout, and print a table on rank 0."""
    lines = [
        f"{n_ranks} gloo ranks, {platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"{datetime.now(UTC):%Y-%m-%d}",
        "",
        BRACKETS,
        "",
        "| layout | measured | planned | ratio | 1/ranks of one | ratio |",
        "|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    crude: list[float] = []
    with join_ranks(TrainingConfig(device="cpu", rank_timeout=300.0)) as ranks:
        for name, recipe in layouts(ranks.world_size).items():
            row = compare(recipe, ranks)
            measured = statistics.median(row["measured"])
            ratio, divided = row["planned"] / measured, row["divided"] / measured
            errors.append(abs(ratio - 1))
            crude.append(abs(divided - 1))
            lines.append(
                f"| {name} | {spread(row['measured'], '{:.3f} s'.format)} | {row['planned']:.3f} s | {ratio:.2f} | "
                f"{row['divided']:.3f} s | {divided:.2f} |"
            )
            if ranks.is_rank_zero:
                print(lines[-1], flush=True)
        lines.append("")
        lines.append(
            f"median error: plan {statistics.median(errors):.1%}, 1/ranks of one process {statistics.median(crude):.1%}"
        )
        if ranks.is_rank_zero:
            print("\n" + "\n".join(lines))
            write_result("rank-seconds", lines)


if __name__ == "__main__":
    if rank_info_of(os.environ).world_size > 1:
        main(rank_info_of(os.environ).world_size)
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--ranks", type=int, default=2)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        sys.exit(subprocess.call([*torchrun, f"--nproc-per-node={parser.parse_args().ranks}", __file__]))
