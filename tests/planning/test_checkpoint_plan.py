"""The planned bytes of a checkpoint that several ranks write are those of the tensors that one process would write."""

import dataclasses
from typing import Any

import pytest

from napkin.checkpoint.state import tensors_of
from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan as make_plan
from napkin.planning.step.machine import CatalogueMachine
from napkin.planning.step.plan_file import whole_checkpoint_bytes
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, ParallelismConfig, TrainingConfig
from napkin.train_step.step import build_train_state

MODEL = ModelConfig(vocab_size=61, context_length=16, d_model=24, n_layers=2, n_heads=4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parallelism", "optimizer", "precision"),
    [
        ({"shard": 4}, {"name": "adamw", "average_decay": 0.9}, "bf16"),
        ({"data": 2, "shard": 2}, {"name": "muon"}, "bf16-pure"),
        ({"data": 4, "shard_optimizer": True}, {"name": "adafactor"}, "bf16"),
    ],
)
def test_the_files_of_all_ranks_hold_one_train_state(
    parallelism: dict[str, Any], optimizer: dict[str, Any], precision: Any
) -> None:
    recipe = Recipe(
        model=MODEL,
        optimizer=OptimizerConfig(**optimizer),
        training=TrainingConfig(batch_size=8, precision=precision),
        parallelism=ParallelismConfig(**parallelism),
    )
    plan = make_plan(recipe, CatalogueMachine(find_device("A100-80GB"), 4))
    resolved = dataclasses.replace(plan.resolved, world_size=1, precision=plan.resolved.precision.on("cpu"))
    tensors = tensors_of(build_train_state(resolved))
    stored = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
    assert whole_checkpoint_bytes(plan) == stored
