"""Each precision trains, is counted as it runs, and goes on after a stop as if there had been none."""

import dataclasses
from pathlib import Path

import pytest
import torch

from napkin.accounting.metering import meter_step
from napkin.checkpoint.restore import load_model, load_train_state
from napkin.checkpoint.writer import save_checkpoint
from napkin.machine_code.processor import has_exact_int8
from napkin.model.config import ModelConfig
from napkin.optim.clipping import FIRST_SCALE, LossScale
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step

with_int8 = pytest.mark.skipif(not has_exact_int8(), reason="int8 is not multiplied exactly here")
# fp16 is refused on a CPU for its speed; its arithmetic is there.
NARROW = [
    Precision("bf16", "cpu"),
    Precision("bf16-pure", "cpu"),
    Precision("fp16", "cpu"),
    Precision("fp8", "cpu"),
    Precision("fp8", "cpu", narrow_form="cuda"),
    Precision("int8", "cpu"),
    pytest.param(Precision("int8", "cpu", narrow_form="cpu"), marks=with_int8),
]
FP32 = Precision("fp32", "cpu")
each_narrow = pytest.mark.parametrize("precision", NARROW, ids=lambda p: f"{p.name}-{p.narrow_form}")
MODEL = ModelConfig(vocab_size=32, context_length=16, d_model=32, n_layers=1, n_heads=2)


def learner_of(precision: Precision, model: ModelConfig = MODEL, **training) -> TrainState:
    settings = TrainingConfig(steps=80, batch_size=4, precision=precision.name, **training)
    return build_train_state(
        ResolvedRecipe(Recipe(model=model, optimizer=OptimizerConfig(warmup_steps=5), training=settings), precision)
    )


def batch(number: int, model: ModelConfig = MODEL) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count upwards in steps of 1 or 3: learnable, and not at once."""
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(model.vocab_size, (4, 1), generator=generator)
    stride = 1 + 2 * torch.randint(2, (4, 1), generator=generator)
    tokens = (first + stride * torch.arange(model.context_length + 1)) % model.vocab_size
    return tokens[:, :-1], tokens[:, 1:]


def weights(train_state: TrainState) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in train_state.model.parameters()])


@pytest.mark.sampled(every=9)
@each_narrow
def test_the_loss_falls_as_it_does_in_fp32(precision: Precision) -> None:
    losses = {}
    for each in (FP32, precision):
        train_state = learner_of(each)
        losses[each] = [train_state.step(number, *batch(number))[0].item() for number in range(60)]
    wide, narrow = ((sum(found[-10:]) / 10) for found in losses.values())
    assert wide < 0.5 * losses[FP32][0]
    assert narrow < wide + 0.02 * losses[FP32][0]


@pytest.mark.sampled(every=15)
@each_narrow
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_a_narrow_step_is_counted_as_it_runs(precision: Precision, micro_batch_size: int | None) -> None:
    model = dataclasses.replace(MODEL, context_length=64, d_model=64, vocab_size=256)
    train_state = learner_of(precision, model, micro_batch_size=micro_batch_size)
    counted = count_step(ResolvedRecipe(train_state.recipe, precision))
    train_state.step(0, *batch(0, model))
    metered = meter_step(train_state.model, lambda: train_state.step(1, *batch(1, model)))
    assert metered.ledger.flops == counted.flops
    assert metered.peak_bytes == pytest.approx(counted.peak_bytes, abs=4096)
    assert counted.unknown_operators == {}


@each_narrow
def test_a_run_in_a_narrow_format_resumes_bit_for_bit(precision: Precision, tmp_path: Path) -> None:
    whole = learner_of(precision)
    for number in range(3):
        whole.step(number, *batch(number))
    resumed = learner_of(precision)
    load_train_state(save_checkpoint(tmp_path, whole, step=3, seconds=0, tokenizer="", train_tokens=""), resumed)
    for number in range(3, 6):
        whole.step(number, *batch(number))
    for number in range(3, 6):
        resumed.step(number, *batch(number))
    assert torch.equal(weights(resumed), weights(whole))


def test_pure_bf16_keeps_two_bytes_a_weight_and_two_a_gradient() -> None:
    pure, mixed = (
        count_step(ResolvedRecipe(learner_of(p).recipe, p)) for p in (Precision("bf16-pure", "cpu"), NARROW[0])
    )
    assert mixed.resident_bytes - pure.resident_bytes == pytest.approx(2 * pure.parameters, rel=0.01)
    train_state = learner_of(Precision("bf16-pure", "cpu"))
    train_state.model.loss(*batch(0)).backward()
    assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in train_state.model.parameters() if p.grad is not None)


def test_a_model_in_bf16_is_read_into_one_in_fp32(tmp_path: Path) -> None:
    pure = learner_of(Precision("bf16-pure", "cpu"))
    pure.step(0, *batch(0))
    saved = save_checkpoint(tmp_path, pure, step=1, seconds=0, tokenizer="", train_tokens="")
    wide = learner_of(FP32)
    load_model(saved, wide.model)
    assert torch.equal(weights(wide), weights(pure))


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), ("bf16", "fp16"), ("bf16-pure", "fp32")])
def test_a_run_goes_on_in_another_precision(before: str, after: str, tmp_path: Path) -> None:
    first, second = (learner_of(Precision(name, "cpu")) for name in (before, after))  # pyright: ignore[reportArgumentType]
    first.step(0, *batch(0))
    load_train_state(save_checkpoint(tmp_path, first, step=1, seconds=0, tokenizer="", train_tokens=""), second)
    assert torch.equal(weights(second), weights(first))
    assert [group["step"] for group in second.optimizer.param_groups] == [1, 1]


def test_a_step_that_overflows_is_left_out_and_the_scale_halved(tmp_path: Path) -> None:
    train_state = learner_of(Precision("fp16", "cpu"))
    train_state.step(0, *batch(0))
    assert train_state.loss_scale is not None
    before, scale = weights(train_state), train_state.loss_scale.scale
    # No fp16 gradient survives this.
    train_state.loss_scale.scale = 2.0**40
    _, norm = train_state.step(1, *batch(1))
    assert torch.equal(weights(train_state), before)
    assert norm == 0
    assert train_state.loss_scale.scale == 2.0**39
    train_state.loss_scale.scale = scale
    # The update that was left out is none of Adam's steps, after a restart neither.
    saved = save_checkpoint(tmp_path, train_state, step=2, seconds=0, tokenizer="", train_tokens="")
    resumed = learner_of(Precision("fp16", "cpu"))
    load_train_state(saved, resumed)
    assert [group["step"] for group in resumed.optimizer.param_groups] == [1, 1]
    for each in (train_state, resumed):
        each.step(2, *batch(2))
    assert torch.equal(weights(resumed), weights(train_state))
    assert not torch.equal(weights(train_state), before)


def test_the_scale_grows_after_many_good_steps_and_is_stored_whole() -> None:
    scale = LossScale()
    for _ in range(1000):
        assert scale.accepts(torch.tensor(1.0))
    assert scale.scale == 2 * FIRST_SCALE
    assert not scale.accepts(torch.tensor(float("nan")))
    assert (scale.scale, scale.good_steps, scale.updates) == (FIRST_SCALE, 0, 1000)
    other = LossScale()
    other.from_tensor(scale.to_tensor())
    assert vars(other) == vars(scale)
