"""Seconds of a step on several ranks of this machine, planned and then measured, over eight layouts.

    python benchmarks/rank_seconds.py [--ranks 2]

Each layout is planned as `napkin train` plans it, by rank 0 while the others wait, and then trained. Beside the plan
stands what users have otherwise: the step of one process, planned, divided by the number of ranks. The table is also
written to benchmarks/results/.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from napkin.distributed.joining import join_ranks
from napkin.distributed.ranks import Ranks, rank_info_of
from napkin.hardware.sampling import ratio_interval
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan_resolved, resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig
from napkin.train_step.step import build_train_state
from result_files import heading, write_result
from turns import BRACKETS, spread, told

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


def main() -> None:
    """Compare every layout; rank 0 prints a table and keeps it."""
    errors: dict[str, list[float]] = {"planned": [], "divided": []}
    with join_ranks(TrainingConfig(device="cpu", rank_timeout=300.0)) as ranks:
        lines = heading(f"Seconds of a step on {ranks.world_size} gloo ranks", BRACKETS) if ranks.is_rank_zero else []
        lines += ["| layout | measured | planned | over measured | 1/ranks of one | over measured |"]
        lines += ["|---|---|---|---|---|---|"]
        if ranks.is_rank_zero:
            print("\n".join(lines[-2:]), flush=True)
        for name, recipe in layouts(ranks.world_size).items():
            row = compare(recipe, ranks)
            measured = row["measured"]
            cells = [name, spread(measured, "{:.3f} s".format)]
            for kind, found in errors.items():
                ratio = ratio_interval([row[kind]] * len(measured), measured)
                found.append(abs(ratio.median - 1))
                cells += [f"{row[kind]:.3f} s", told(ratio)]
            lines.append(f"| {' | '.join(cells)} |")
            if ranks.is_rank_zero:
                print(lines[-1], flush=True)
        plan, crude = (statistics.median(found) for found in errors.values())
        lines += ["", f"median error: plan {plan:.1%}, 1/ranks of one process {crude:.1%}"]
        if ranks.is_rank_zero:
            print("\n".join(lines[-2:]))
            write_result("rank-seconds", lines)


if __name__ == "__main__":
    if rank_info_of(os.environ).world_size > 1:
        main()
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--ranks", type=int, default=2)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        sys.exit(subprocess.call([*torchrun, f"--nproc-per-node={parser.parse_args().ranks}", __file__]))
