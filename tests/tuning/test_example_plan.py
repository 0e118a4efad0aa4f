"""A step on sequences is counted as it runs: FLOPs to the last one, the peak to the allocator's bytes."""

import dataclasses

import numpy as np
import pytest

from napkin.accounting.metering import meter_step
from napkin.chats.token_sequence import Example, TokenSequence
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.train_step.step import build_train_state
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.example_plan import count_examples
from napkin.tuning.packing import Packing, micro_batches_of
from napkin.tuning.sequence_step import totals_of, train_on_examples


def some_examples(n: int) -> list[Example]:
    generator = np.random.default_rng(1)
    examples = []
    for _ in range(n):
        length = int(generator.integers(20, 60))
        examples.append((TokenSequence(generator.integers(0, 512, length), np.arange(length) >= length // 2),))
    return examples


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_count_of_a_step_is_its_meter(packing: Packing, recompute: str) -> None:
    model = ModelConfig(vocab_size=512, context_length=128, d_model=64, n_layers=2, n_heads=4)
    training = TrainingConfig(batch_size=8, recompute=recompute)  # pyright: ignore[reportArgumentType]
    resolved = ResolvedRecipe(TuningRecipe(model=model, training=training), Precision("fp32", "cpu"))
    examples, objective = some_examples(8), SupervisedObjective()
    parts = micro_batches_of(examples, max_tokens=256, row_length=128, packing=packing)
    counted = count_examples(resolved, parts, totals_of(parts), objective)
    train_state = build_train_state(resolved)

    def step(number: int) -> None:
        train_on_examples(train_state, number, examples, objective, max_tokens=256, packing=packing)

    step(0)
    step(1)
    metered = meter_step(train_state.model, lambda: step(2))
    assert counted.flops == metered.ledger.flops
    assert metered.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.01)
    assert counted.parameters == sum(parameter.numel() for parameter in train_state.model.parameters())


@pytest.mark.thorough
def test_more_tokens_take_more() -> None:
    model = ModelConfig(vocab_size=512, context_length=128, d_model=64, n_layers=1, n_heads=4)
    resolved = ResolvedRecipe(TuningRecipe(model=model), Precision("fp32", "cpu"))
    flops = []
    for n in (4, 8):
        parts = micro_batches_of(some_examples(n), max_tokens=128, row_length=128)
        flops.append(count_examples(resolved, parts, totals_of(parts), SupervisedObjective()).flops)
    assert flops[1] > 1.5 * flops[0]
    other = dataclasses.replace(resolved, precision=Precision("bf16", "cpu"))
    assert count_examples(other, parts, totals_of(parts), SupervisedObjective()).flops == flops[1]
