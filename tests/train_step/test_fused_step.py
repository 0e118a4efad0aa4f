"""A training step whose operators are those with Triton forms, in their plain forms: numbers, counts and bytes."""

import dataclasses
from typing import Any, Literal

import pytest

from napkin.accounting.recording import record
from napkin.hardware.target import CudaTarget
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import build_train_state
from napkin.train_step.step_ledger import count_step
from train_step.test_compiled_step import MODELS, batch


def resolved(
    model: str, kernels: Literal["plain", "triton"], products: Literal["fp32", "bf16"], **config: Any
) -> ResolvedRecipe:
    shape = ModelConfig(301, 32, d_model=64, n_layers=2, n_heads=4, **MODELS[model], **config)
    optimizer = OptimizerConfig(learning_rate=1e-3, fused=True, warmup_steps=0).resolved
    training = TrainingConfig(batch_size=4, kernels=kernels, loss_chunk_size=64)
    recipe = Recipe(model=shape, optimizer=optimizer, training=training)
    return ResolvedRecipe(recipe, Precision(products, "cpu"), CudaTarget())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("model", "products"), [*((model, "fp32") for model in MODELS), ("llama", "bf16")])
def test_losses_are_those_of_the_plain_form(model: str, products: Literal["fp32", "bf16"]) -> None:
    losses = []
    for kernels in ("plain", "triton"):
        state = build_train_state(resolved(model, kernels, products))
        losses.append([float(state.step(number, *batch(number))[0]) for number in range(5)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if products == "fp32" else 1e-2)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu_flops_are_counted_alike_and_fewer_bytes(model: str) -> None:
    plain, fused = (count_step(resolved(model, kernels, "bf16")) for kernels in ("plain", "triton"))
    assert fused.flops == plain.flops
    assert not fused.unknown_operators
    assert sum(row.bytes_read + row.bytes_written for row in fused.rows) < sum(
        row.bytes_read + row.bytes_written for row in plain.rows
    )
    assert len([row for row in fused.rows if row.bytes_written]) < len([row for row in plain.rows if row.bytes_written])
    # The copies of the matrices stay between steps.
    assert fused.peak_bytes <= plain.peak_bytes + 2 * plain.parameters


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("model", ["gpt2", "experts"])
def test_counted_bytes_are_those_of_a_real_step(model: str) -> None:
    wanted = dataclasses.replace(resolved(model, "triton", "bf16"), target=None)
    state, counted = build_train_state(wanted), count_step(wanted)
    numbers = iter(range(10))
    recorded = record(state.model, lambda: state.step(next(numbers), *batch(0)), warm_up=1)
    assert recorded.peak_bytes == pytest.approx(counted.peak_bytes, rel=1e-3)
    assert recorded.flops == counted.flops
