import dataclasses

import pytest
import torch

from napkin.accounting.metering import meter_step
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step

MODEL = ModelConfig(vocab_size=61, context_length=32, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)
FORMS = [("selective", 1), ("full", 1), ("full", 2)]
FP32 = Precision("fp32", "cpu")


def make_recipe(what: str = "none", every: int = 1, *, model: ModelConfig = MODEL, **training) -> Recipe:
    settings = TrainingConfig(batch_size=4, recompute=what, recompute_every=every, **training)  # pyright: ignore[reportArgumentType]
    return Recipe(model=model, optimizer=OptimizerConfig(warmup_steps=0), training=settings)


def train(train_state: TrainState, steps: range) -> torch.Tensor:
    for number in steps:
        train_state.step(number, *batch(number))
    return torch.cat([parameter.detach().flatten() for parameter in train_state.model.parameters()])


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(61, (4, 33), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        dataclasses.replace(MODEL, dropout=0.3, attention="plain"),
        dataclasses.replace(MODEL, n_experts=4, d_expert=16),
    ],
    ids=["plain", "dropout", "experts"],
)
@pytest.mark.parametrize(("what", "every"), FORMS)
def test_recomputation_changes_no_bit(what: str, every: int, model: ModelConfig) -> None:
    kept = train(build_train_state(ResolvedRecipe(make_recipe(model=model), FP32)), range(3))
    recomputed = train(
        build_train_state(ResolvedRecipe(make_recipe(what, every, model=model, micro_batch_size=2), FP32)), range(0)
    )
    assert not torch.equal(recomputed, kept)
    recomputed = train(build_train_state(ResolvedRecipe(make_recipe(what, every, model=model), FP32)), range(3))
    assert torch.equal(recomputed, kept)


@pytest.mark.thorough
@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize(("what", "every"), FORMS)
def test_what_is_computed_again_is_counted_as_it_runs(what: str, every: int, products: str) -> None:
    precision = Precision(products, "cpu")  # pyright: ignore[reportArgumentType]
    model = dataclasses.replace(MODEL, context_length=96, d_model=64, n_heads=2)
    recipe = make_recipe(what, every, model=model, micro_batch_size=2)
    counted, plain = (
        count_step(ResolvedRecipe(recipe, precision)),
        count_step(ResolvedRecipe(make_recipe(model=model, micro_batch_size=2), precision)),
    )
    train_state = build_train_state(ResolvedRecipe(recipe, precision))
    tokens = torch.randint(61, (4, 97), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    train_state.step(0, inputs, targets)
    metered = meter_step(train_state.model, lambda: train_state.step(1, inputs, targets))
    assert metered.ledger.flops == counted.flops == plain.flops
    assert metered.ledger.hardware_flops == counted.hardware_flops
    assert metered.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.02)
    assert counted.peak_bytes < plain.peak_bytes


def test_full_recomputation_costs_the_products_of_a_forward_pass_but_the_last() -> None:
    model = dataclasses.replace(MODEL, attention="plain")
    ledger = count_step(ResolvedRecipe(make_recipe("full", model=model), FP32))
    in_blocks = [row for row in ledger.rows if row.module.startswith("blocks.")]
    forward = sum(row.flops for row in in_blocks if row.phase == "forward")
    # Whatever comes after the last tensor that the backward pass wants is left out: the matrix that writes.
    last = sum(row.flops for row in in_blocks if row.phase == "forward" and row.module.endswith("feed_forward.down"))
    again = sum(row.flops for row in ledger.rows if row.phase == "recompute")
    assert again == forward - last > 0
    assert ledger.hardware_flops == ledger.flops + again


def test_selective_recomputation_keeps_what_products_with_weights_have_made() -> None:
    ledger = count_step(ResolvedRecipe(make_recipe("selective"), FP32))
    again = {row.operator for row in ledger.rows if row.phase == "recompute"}
    assert {"silu", "rsqrt"} <= again
    assert not {"mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"} & again


def test_an_evaluation_computes_nothing_twice() -> None:
    train_state = build_train_state(ResolvedRecipe(make_recipe("full"), FP32))
    inputs, targets = batch(0)
    plain = build_train_state(ResolvedRecipe(make_recipe(), FP32))
    with torch.no_grad():
        assert torch.equal(train_state.model.loss(inputs, targets), plain.model.loss(inputs, targets))
