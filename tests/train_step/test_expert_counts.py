import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.runs.metrics import read_metrics
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step
from napkin.training.run import create_run, train_run
from oracles.tiny_run import tiny_recipe, write_tiny_text

EXPERTS = {"n_experts": 4, "experts_per_token": 2}


def train_state(micro_batch_size: int, **model: Any) -> TrainState:
    config = ModelConfig(61, context_length=16, d_model=16, n_layers=2, n_heads=2, **model)
    recipe = Recipe(model=config, training=TrainingConfig(batch_size=4, micro_batch_size=micro_batch_size))
    return build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(0))
    return tokens, tokens


def test_visits_are_those_of_the_whole_batch_however_it_is_cut() -> None:
    figures = []
    for size in (4, 2, 1):
        each = train_state(size, **EXPERTS)
        each.step(0, *batch())
        figures.append(each.expert_counts.read())
    assert figures[0] == figures[1] == figures[2]
    tokens, dropped = figures[0]
    assert [sum(layer) for layer in tokens] == [4 * 16 * 2] * 2
    assert dropped == [0, 0]


def test_a_step_s_visits_are_its_own_and_those_of_its_routers() -> None:
    each = train_state(4, **EXPERTS, expert_capacity=0.5)
    for number in range(3):
        each.step(number, *batch())
    tokens, dropped = each.expert_counts.read()
    routings = each.model.routings()
    assert tokens == [routing.tokens_per_expert.tolist() for routing in routings]
    assert dropped == [routing.dropped.item() for routing in routings]
    assert dropped is not None
    assert min(dropped) > 0


def test_a_dense_model_pays_nothing_and_tells_nothing() -> None:
    dense = train_state(2)
    dense.step(0, *batch())
    assert dense.expert_counts.read() == (None, None)


@pytest.mark.thorough
def test_metrics_tell_the_visits_of_a_mixture(tmp_path: Path) -> None:
    write_tiny_text(tmp_path)
    recipe = tiny_recipe(tmp_path, steps=3, micro_batch_size=2)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, n_experts=4))
    preparation, run = create_run(recipe, tmp_path / "run")
    outcome = train_run(preparation, run)
    for line in read_metrics(run.path / "metrics.jsonl"):
        assert line.expert_tokens is not None
        assert [sum(layer) for layer in line.expert_tokens] == [2 * recipe.tokens_per_step]
        assert line.dropped_tokens == [0]
    assert outcome.measurement is not None
    assert outcome.measurement.flops == count_step(ResolvedRecipe(preparation.recipe, preparation.precision)).flops
