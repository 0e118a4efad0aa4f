"""A job of some ranks that computes the gradients of adapters, by DDP and by FSDP.

Its arguments are a folder, how many ranks there are, and a free port. Rank 0 leaves gradients.safetensors: by kind of
adapter, precision and strategy, the gradient after an update.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from napkin.distributed.joining import join_ranks
from napkin.distributed.ranks import ALONE, Ranks
from napkin.recipe.precision import Precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import AdapterConfig, TuningRecipe
from napkin.train_step.step import build_train_state
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.sequence_step import train_on_examples
from oracles.alignment_cases import MODEL, gradient_of, some_examples
from reliability.rank_cases import leave_groups
from reliability.ranks import fork_ranks

CASES = [("lora", "fp32"), ("dora", "fp32"), ("lora", "bf16")]


def adapter_gradients(kind: Any, precision: Any, ranks: Ranks = ALONE, strategy: Any = "ddp") -> Tensor:
    """Of a batch, after a step on it; frozen weights have 0."""
    settings: dict[str, Any] = {"parallelism": strategy, "precision": precision, "device": "cpu", "kernels": "plain"}
    recipe = TuningRecipe(
        model=dataclasses.replace(MODEL, tie_embeddings=False),
        optimizer=OptimizerConfig(learning_rate=0.1, clip_norm=1e9, warmup_steps=0, average_decay=0.9).resolved,
        training=TrainingConfig(batch_size=4, **settings),
        adapter=AdapterConfig(kind, rank=2, modules=("attention", "mlp", "head")),
    )
    train_state = build_train_state(ResolvedRecipe(recipe, Precision(precision, "cpu")), ranks)
    train_on_examples(train_state, 0, some_examples(), SupervisedObjective(), max_tokens=64)
    return gradient_of(train_state, some_examples(), SupervisedObjective())[0]


def compute_cases(folder: Path) -> None:
    """Compute all cases on this rank."""
    gradients = {}
    with join_ranks(TrainingConfig(device="cpu", rank_timeout=60.0)) as ranks:
        for kind, precision in CASES:
            for strategy in ("ddp", "fsdp"):
                found = adapter_gradients(kind, precision, ranks, strategy)
                gradients[f"{kind}, {precision}, {strategy}"] = found.float()
                leave_groups(ranks)
        if ranks.is_rank_zero:
            save_file(gradients, folder / "gradients.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    sys.exit(fork_ranks(lambda rank: compute_cases(folder), int(sys.argv[2]), int(sys.argv[3])))
