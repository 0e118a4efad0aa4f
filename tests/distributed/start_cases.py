"""A job of some ranks that build train states: each rank leaves whether its numbers are those of a whole model, and
the most bytes that the allocator held meanwhile, beside the bytes of its shard.

Its arguments are a folder, how many ranks there are, and a free port; the folder has a Hugging Face folder, hf/.
"""

import datetime
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import napkin.distributed.sharded_start
from napkin.accounting.memory import allocator_events
from napkin.distributed.fake_ranks import forget_meshes
from napkin.distributed.process_group import ProcessGroupRanks
from napkin.distributed.ranks import RankInfo, Ranks
from napkin.model.huggingface.convert import load_huggingface, load_huggingface_parts, read_huggingface_config
from napkin.recipe.precision import Precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import TrainState, build_train_state
from reliability.rank_cases import Case, recipe_of, train_state_of
from reliability.ranks import fork_ranks

EXPERTS = {"n_experts": 3, "d_expert": 16}
SHARDS = {"parallelism": "fsdp"}
CASES: dict[int, dict[str, Case]] = {
    2: {
        "shards": {"training": SHARDS},
        "experts tied learned": {
            "training": SHARDS,
            "model": {**EXPERTS, "positions": "learned", "tie_embeddings": True, "biases": "qkv"},
        },
        "bf16": {"training": {**SHARDS, "precision": "bf16-pure"}, "optimizer": {"average_decay": 0.9}},
    },
    4: {
        "tensor": {"training": SHARDS, "parallelism": {"shard": 2, "tensor": 2}},
        "pipeline": {"training": {**SHARDS, "micro_batch_size": 1}, "parallelism": {"shard": 2, "pipeline": 2}},
        "divided experts": {
            "training": SHARDS, "model": {**EXPERTS, "n_experts": 4}, "parallelism": {"shard": 4, "expert": 2},
        },
    },
}  # fmt: skip
LARGE: Case = {"training": SHARDS, "model": {"d_model": 192, "n_layers": 4, "vocab_size": 2048}}


def differing(state: TrainState, whole: dict[str, torch.Tensor]) -> list[str]:
    """The parameters of a rank that are not the same parts of whole ones."""
    parts = state.parallel_model.parts({name: each.detach() for name, each in state.model.named_parameters()})
    return [
        name
        for name, own in parts.items()
        if any(not torch.equal(part.tensor, whole[name][part.place]) for part in own)
    ]


def resolved_of(case: Case) -> ResolvedRecipe:
    recipe = recipe_of(case)
    return ResolvedRecipe(recipe, Precision(recipe.training.precision, "cpu"))  # pyright: ignore[reportArgumentType]


def from_huggingface(folder: Path, ranks: Ranks) -> list[str]:
    """The parameters of a rank that differ from those that one process reads."""
    resolved = resolved_of({"training": SHARDS})
    recipe = replace(resolved.recipe, model=read_huggingface_config(folder))
    state = build_train_state(
        replace(resolved, recipe=recipe),
        ranks,
        initialize=lambda config, parts: load_huggingface_parts(config, parts, folder),
    )
    return differing(state, {name: each.detach() for name, each in load_huggingface(folder).named_parameters()})


def run_rank(folder: Path, rank: int, size: int) -> None:
    """Run all cases of so many ranks on this one."""
    dist.init_process_group("gloo")
    ranks = ProcessGroupRanks(RankInfo(rank, size, rank, size), datetime.timedelta(seconds=60))
    found: dict[str, Any] = {}
    # Several pieces to each matrix, some of them of a part of a row's neighbours.
    napkin.distributed.sharded_start.PIECE = 100
    for name, case in CASES[size].items():
        forget_meshes()
        whole = load_file(folder / f"{name}.safetensors")
        found[name] = differing(train_state_of(case, ranks), whole)
        gc.collect()
    napkin.distributed.sharded_start.PIECE = 2**16
    if size == 2:
        for path in sorted(folder.glob("hf-*")):
            found[path.name] = from_huggingface(path, ranks)
        with allocator_events() as growth:
            state = train_state_of(LARGE, ranks)
        parts = state.parallel_model.parts({name: each.detach() for name, each in state.model.named_parameters()})
        found["held"] = growth[0]
        found["shard"] = sum(part.tensor.nbytes for own in parts.values() for part in own)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    # Rank 0 has the store in which the others may still look for their neighbours.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    place, n = Path(sys.argv[1]), int(sys.argv[2])
    sys.exit(fork_ranks(lambda rank: run_rank(place, rank, n), n, int(sys.argv[3])))
