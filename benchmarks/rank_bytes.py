"""Peak bytes of each rank, plan against meter: 49 layouts on 2 and 4 gloo ranks of this machine.

    python benchmarks/rank_bytes.py [WORDS | NAMES ...]

Each case is planned (a rank's step traced on a fake process group), then trained by forked ranks that meter some steps
and take the smallest peak. Printed are the bytes at the peak of each rank, planned and by the allocator's own events,
and in brackets by how much the bytes in tensors are below those: the allocator also has what oneDNN takes during a
product in bf16. Words choose cases by parts of their names; names of cases choose these.
"""

import argparse
import dataclasses
import functools
import gc
import importlib
import json
import os
import socket
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from napkin.accounting.ledger import METERED_STEP
from napkin.accounting.metering import meter_step
from napkin.distributed.joining import join_ranks
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, ParallelismConfig, TrainingConfig
from napkin.train_step.step import build_train_state
from napkin.train_step.step_ledger import count_step
from result_files import heading

MODEL: dict[str, Any] = {
    "vocab_size": 250,
    "context_length": 64,
    "d_model": 64,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
}
EXPERTS = {"n_experts": 4, "d_expert": 32}
EVEN = {**EXPERTS, "experts_per_token": 4}
"""Each expert gets every token: as evenly distributed as plans assume."""
METERED_STEPS = 5
"""On a busy machine two steps of two were seen to hold a tensor for too long."""
Case = dict[str, Any]
IMPORTED = (
    "napkin.distributed.context_parallel",
    "napkin.distributed.expert_parallel",
    "napkin.distributed.pipeline",
    "napkin.distributed.sharding",
    "napkin.distributed.tensor_parallel",
    "torch.distributed.fsdp",
)
"""What ranks import when they need it, here once for all of them."""


def case(ranks: int, model: Case | None = None, optimizer: Case | None = None, **tables: Any) -> Case:
    """A layout and what it trains; `tables` are fields of [parallelism] and of [training]."""
    names = [field.name for field in dataclasses.fields(ParallelismConfig) if field.name in tables]
    dimensions = {name: tables.pop(name) for name in names}
    return {
        "ranks": ranks,
        "model": model or {},
        "optimizer": optimizer or {},
        "parallelism": dimensions,
        "training": tables,
    }


CASES: dict[str, Case] = {
    "ddp 2": case(2),
    "ddp 2 accumulated": case(2, micro_batch_size=1),
    "ddp 2 bf16": case(2, precision="bf16"),
    "ddp 4 bf16-pure": case(4, precision="bf16-pure"),
    "ddp 4 muon": case(4, optimizer={"name": "muon"}),
    "ddp 4 full recomputation": case(4, recompute="full", micro_batch_size=1),
    "fsdp 2": case(2, shard=2),
    "fsdp 2 accumulated": case(2, shard=2, micro_batch_size=1),
    "fsdp 2 bf16": case(2, shard=2, precision="bf16"),
    "fsdp 2 bf16 accumulated": case(2, shard=2, precision="bf16", micro_batch_size=1),
    "fsdp 2 fp16": case(2, shard=2, precision="fp16"),
    "fsdp 2 adafactor": case(2, shard=2, optimizer={"name": "adafactor"}),
    "fsdp 2 muon averaged": case(2, shard=2, optimizer={"name": "muon", "average_decay": 0.9}),
    "fsdp 2 experts": case(2, EXPERTS, shard=2),
    "fsdp 2 one expert": case(2, {**EXPERTS, "n_experts": 1, "experts_per_token": 1}, shard=2),
    "fsdp 2 as many experts": case(2, {**EXPERTS, "n_experts": 2}, shard=2),
    "fsdp 2 uneven experts": case(2, {**EXPERTS, "n_experts": 3}, shard=2),
    "expert 2": case(2, EVEN, data=2, expert=2),
    "expert 2 shard 2 bf16": case(2, EVEN, shard=2, expert=2, precision="bf16"),
    "expert 2 shard 4": case(4, EVEN, shard=4, expert=2, micro_batch_size=2),
    "fsdp 4": case(4, shard=4),
    "fsdp 4 fewer experts": case(4, {**EXPERTS, "n_experts": 3}, shard=4),
    "fsdp 4 as many experts": case(4, EXPERTS, shard=4),
    "fsdp 4 uneven experts": case(4, {**EXPERTS, "n_experts": 6}, shard=4),
    "fsdp 4 full recomputation": case(4, shard=4, recompute="full"),
    "fsdp 4 selective recomputation": case(4, shard=4, recompute="selective", micro_batch_size=1),
    "fsdp 4 bf16-pure": case(4, shard=4, precision="bf16-pure"),
    "zero-1 2": case(2, shard_optimizer=True),
    "zero-1 4 bf16": case(4, shard_optimizer=True, precision="bf16"),
    "zero-1 4 muon": case(4, shard_optimizer=True, optimizer={"name": "muon"}),
    "tensor 2": case(2, tensor=2),
    "tensor 2 bf16": case(2, tensor=2, precision="bf16"),
    "tensor 2 accumulated": case(2, tensor=2, micro_batch_size=2, recompute="full"),
    "tensor 2 experts": case(2, EXPERTS, tensor=2),
    "tensor 4 muon": case(4, {"n_kv_heads": 4}, tensor=4, optimizer={"name": "muon"}),
    "tensor 2 data 2": case(4, tensor=2, data=2),
    "tensor 2 shard 2": case(4, tensor=2, shard=2),
    "context 2": case(2, context=2),
    "context 2 bf16": case(2, context=2, precision="bf16", micro_batch_size=4),
    "context 2 shard 2": case(4, context=2, shard=2),
    "context 2 tensor 2": case(4, context=2, tensor=2),
    "pipeline 2 gpipe": case(2, pipeline=2, schedule="gpipe", micro_batch_size=4),
    "pipeline 2 1f1b": case(2, pipeline=2, micro_batch_size=2),
    "pipeline 2 interleaved": case(2, pipeline=2, schedule="interleaved-1f1b", micro_batch_size=2),
    "pipeline 4 bf16": case(4, pipeline=4, micro_batch_size=2, precision="bf16"),
    "pipeline 2 data 2": case(4, pipeline=2, data=2, micro_batch_size=2),
    "pipeline 2 shard 2": case(4, pipeline=2, shard=2, micro_batch_size=2, recompute="full"),
    "hsdp 2 x 2": case(4, data=2, shard=2),
    "hsdp 2 x 2 bf16 accumulated": case(4, data=2, shard=2, precision="bf16", micro_batch_size=1),
}


def resolved_of(case: Case) -> ResolvedRecipe:
    """The resolved recipe of a case."""
    training = TrainingConfig(**{"batch_size": 16, "steps": 4, "precision": "fp32", "device": "cpu"} | case["training"])
    recipe = Recipe(
        model=ModelConfig(**MODEL | case["model"]),
        optimizer=OptimizerConfig(**{"warmup_steps": 0, **case["optimizer"]}).resolved,
        training=training,
        parallelism=ParallelismConfig(**case["parallelism"]),
    )
    return ResolvedRecipe(recipe, Precision(training.precision, "cpu"), world_size=case["ranks"])  # pyright: ignore[reportArgumentType]


def metered_bytes(resolved: ResolvedRecipe, ranks: Ranks = ALONE) -> tuple[int, int]:
    """This rank's peak bytes in a step: those in tensors, and by the allocator's events; the least of several steps.

    gloo sends in threads of its own, which let go of a tensor a moment after the collective is over: on a busy machine
    a step may hold one for longer than it uses it.
    """
    gc.collect()
    train_state = build_train_state(resolved, ranks)
    recipe = resolved.recipe
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[int, int]] = []
    for number in range(METERED_STEP + METERED_STEPS):
        shape = (recipe.training.batch_size, recipe.model.context_length + 1)
        tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator)
        rows = train_state.parallel_model.rows(recipe.training.batch_size)
        inputs, targets = tokens[rows, :-1].clone(), tokens[rows, 1:].clone()
        del tokens
        step = functools.partial(train_state.step, number, inputs, targets)
        if number < METERED_STEP:
            step()
        else:
            measured = meter_step(train_state.model, step)
            found.append((measured.ledger.peak_bytes, measured.peak_bytes))
        del step
    return min(found)


def run_rank(folder: Path, cases: dict[str, Case]) -> None:
    """Meter all cases on this rank."""
    with join_ranks(TrainingConfig(device="cpu", rank_timeout=300.0)) as ranks:
        for name, each in cases.items():
            try:
                found = ranks.all_gather(metered_bytes(resolved_of(each), ranks))
            except NapkinError as error:
                found = str(error)
            if ranks.is_rank_zero:
                (folder / f"{name}.json").write_text(json.dumps(found))


def fork_ranks(size: int, run: Callable[[int], None], *, imported: Iterable[str]) -> None:
    """Fork the ranks of a process group, which each call `run`, and wait for them; modules are imported before."""
    for module in imported:
        importlib.import_module(module)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: list[int] = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            try:
                run(rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit("a rank failed")


def compared(planned: int, metered: tuple[int, int]) -> str:
    """A rank's planned bytes beside the allocator's, and in brackets those in tensors."""
    tensors, allocated = metered
    return f"{planned:,} / {allocated:,} {planned / allocated - 1:+.3%} ({tensors / allocated - 1:+.3%})"


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="names of cases, or words that a name has; all cases by default")
    words: list[str] = parser.parse_args().words
    heading("Peak bytes of each rank, plan against meter")
    torch.set_num_threads(1)
    chosen = {name: CASES[name] for name in words if name in CASES}
    chosen = chosen or {name: each for name, each in CASES.items() if all(word in name for word in words)}
    if not chosen:
        parser.error(f"no case has {' and '.join(words)} in its name; there are {', '.join(CASES)}")
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in (2, 4):
            cases = {name: each for name, each in chosen.items() if each["ranks"] == size}
            if cases:
                fork_ranks(size, lambda _, cases=cases: run_rank(Path(folder), cases), imported=IMPORTED)
            for name, each in cases.items():
                metered = json.loads((Path(folder) / f"{name}.json").read_text())
                planned = [count_step(resolved_of(each), rank).peak_bytes for rank in range(size)]
                errors += [abs(plan / allocated - 1) for plan, (_, allocated) in zip(planned, metered, strict=True)]
                print(f"{name:32}", *map(compared, planned, metered))
    print(
        f"{len(errors)} ranks of {len(chosen)} layouts: median {statistics.median(errors):.4%}, worst {max(errors):.4%}"
    )


if __name__ == "__main__":
    main()
