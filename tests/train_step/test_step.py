import dataclasses
from typing import Literal

import pytest
import torch
from torch.nn import functional

from napkin.accounting.ledger import Ledger
from napkin.accounting.metering import meter_step
from napkin.optim.registry import warmup_cosine
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step
from oracles.tiny_run import MODEL, TRAINING

VOCAB_SIZE = 61


def make_recipe(**training) -> Recipe:
    return Recipe(
        model=dataclasses.replace(MODEL, vocab_size=VOCAB_SIZE),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        training=dataclasses.replace(TRAINING, **training),
    )


def make_learner(products: str = "fp32", **training) -> TrainState:
    return build_train_state(ResolvedRecipe(make_recipe(**training), Precision(products, "cpu")))  # pyright: ignore[reportArgumentType]


def batch(number: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCAB_SIZE, (rows, MODEL.context_length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def weights(train_state: TrainState) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in train_state.model.parameters()])


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_give_the_update_of_the_whole_batch(size: int) -> None:
    whole, parts = make_learner(), make_learner(micro_batch_size=size)
    for number in range(3):
        loss, norm = whole.step(number, *batch(number))
        part_loss, part_norm = parts.step(number, *batch(number))
        torch.testing.assert_close(part_loss, loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(part_norm, norm, rtol=1e-4, atol=0)
    for name in ("exp_avg", "exp_avg_sq"):
        moments = [
            torch.cat([train_state.optimizer.state[p][name].flatten() for p in train_state.model.parameters()])
            for train_state in (whole, parts)
        ]
        assert (moments[1] - moments[0]).norm() < 1e-5 * moments[0].norm()
    assert (weights(parts) - weights(whole)).norm() < 1e-4 * weights(whole).norm()


def test_a_step_is_cross_entropy_clipping_and_adamw_by_torch() -> None:
    train_state, witness = make_learner(), make_learner().model
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in witness.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in witness.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for number in range(4):
        inputs, targets = batch(number)
        found_loss, found_norm = train_state.step(number, inputs, targets)
        loss = functional.cross_entropy(witness(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(witness.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(number, peak=1e-2, warmup_steps=2, total_steps=40, final_fraction=0.05)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-4, atol=0)
        torch.testing.assert_close(found_norm, norm, rtol=1e-3, atol=0)


def test_the_loss_is_of_the_weights_before_the_update() -> None:
    train_state = make_learner("fp32")
    inputs, targets = batch(0)
    with torch.no_grad():
        expected = functional.cross_entropy(train_state.model(inputs).flatten(0, 1), targets.flatten())
    loss, _ = train_state.step(0, inputs, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_the_count_of_a_step_is_what_the_step_does(products: str, micro_batch_size: int | None) -> None:
    recipe = make_recipe(batch_size=2, micro_batch_size=micro_batch_size)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, d_model=128))
    train_state = build_train_state(ResolvedRecipe(recipe, Precision(products, "cpu")))  # pyright: ignore[reportArgumentType]
    counted = count_step(ResolvedRecipe(train_state.recipe, train_state.precision))
    train_state.step(0, *batch(0, rows=2))
    inputs, targets = batch(1, rows=2)
    metered = meter_step(train_state.model, lambda: train_state.step(1, inputs, targets))
    assert metered.ledger.flops == counted.flops
    assert metered.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.02)
    assert counted.unknown_operators == {}


def test_less_at_a_time_takes_less_memory_and_the_same_flops() -> None:
    ledgers = [
        count_step(ResolvedRecipe(make_recipe(micro_batch_size=size), Precision("fp32", "cpu"))) for size in (4, 1)
    ]
    peaks = [ledger.peak_bytes for ledger in ledgers]
    assert peaks[0] > 1.3 * peaks[1]
    assert ledgers[0].flops == ledgers[1].flops


@pytest.mark.thorough
def test_a_metered_step_changes_nothing() -> None:
    plain, watched = make_learner("bf16"), make_learner("bf16")
    for number in range(2):
        inputs, targets = batch(number)
        plain.step(number, inputs, targets)
        meter_step(watched.model, lambda n=number, i=inputs, t=targets: watched.step(n, i, t))
    assert torch.equal(weights(plain), weights(watched))


def test_a_seed_means_the_same_weights_and_another_one_others() -> None:
    assert torch.equal(weights(make_learner(init_seed=3)), weights(make_learner(init_seed=3)))
    assert not torch.equal(weights(make_learner(init_seed=3)), weights(make_learner(init_seed=4)))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_many_micro_batches_are_counted_as_if_each_had_been_traced(
    target: Literal["cpu", "cuda"], products: Literal["fp32", "bf16"], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(batch_size=12, micro_batch_size=2)
    told = count_step(ResolvedRecipe(recipe, Precision(products, "cpu"), target))
    monkeypatch.setattr("napkin.train_step.step_ledger.TRACED_MICRO_BATCHES", 6)
    traced = count_step(ResolvedRecipe(recipe, Precision(products, "cpu"), target))

    # Rows that split the batch into its parts, and weigh a part in the loss, were called with other numbers.
    def without_calls(ledger: Ledger) -> Ledger:
        return dataclasses.replace(ledger, rows=tuple(dataclasses.replace(row, call=None) for row in ledger.rows))

    assert without_calls(told) == without_calls(traced)
    assert told.causal_flops == traced.causal_flops


def test_one_micro_batch_does_not_tell_of_more() -> None:
    ledger = count_step(ResolvedRecipe(make_recipe(batch_size=2), Precision("fp32", "cpu")))
    with pytest.raises(ValueError, match="too few micro-batches"):
        ledger.with_more_micro_batches(1)


def test_a_step_is_counted_for_the_device_that_its_precision_names() -> None:
    # Heads of 8 or 16 numbers, which no kernel pads.
    recipe = dataclasses.replace(make_recipe(), model=dataclasses.replace(make_recipe().model, d_model=32, n_heads=2))
    on_cpu, on_gpu = (count_step(ResolvedRecipe(recipe, Precision("bf16", name))) for name in ("cpu", "cuda"))
    assert on_cpu.reserved_bytes is None
    assert on_gpu.reserved_bytes is not None
    assert on_gpu == count_step(ResolvedRecipe(recipe, Precision("bf16", "cpu"), "cuda"))
    assert on_gpu.flops == on_cpu.flops


def test_what_a_step_drops_follows_from_seed_and_step_alone() -> None:
    def loss(number: int, seed: int) -> float:
        recipe = make_recipe(dropout_seed=seed)
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dropout=0.5))
        torch.manual_seed(number + 17)
        return build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu"))).step(number, *batch(0))[0].item()

    torch.manual_seed(1)
    first = loss(3, seed=0)
    torch.manual_seed(2)
    assert loss(3, seed=0) == first
    assert loss(4, seed=0) != first
    assert loss(3, seed=1) != first
