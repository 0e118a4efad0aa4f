import re

import pytest

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.planning.step import memory_savings
from napkin.planning.step.memory_savings import refuse_far_too_much
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step_ledger import count_step

PRECISION = Precision("fp32", "cpu")


@pytest.fixture(autouse=True)
def soon_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting what is really large takes minutes, which is what the code under test is there to avoid."""
    monkeypatch.setattr(memory_savings, "_PROBE_TOKENS", 1024)
    monkeypatch.setattr(memory_savings, "_MANY_TOKENS", 4096)


def recipe(batch_size: int, micro_batch_size: int | None = None, context_length: int = 512) -> Recipe:
    return Recipe(
        model=ModelConfig(vocab_size=300, context_length=context_length, d_model=64, n_layers=1, n_heads=2),
        optimizer=OptimizerConfig(warmup_steps=0),
        training=TrainingConfig(batch_size=batch_size, micro_batch_size=micro_batch_size),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "large",
    [recipe(12), recipe(2, context_length=3072), recipe(24, 12)],
    ids=["one batch", "long sequences", "two micro-batches"],
)
def test_what_is_refused_before_it_is_counted_is_what_the_count_would_refuse(large: Recipe) -> None:
    peak = count_step(ResolvedRecipe(large, PRECISION)).peak_bytes
    refuse_far_too_much(ResolvedRecipe(large, PRECISION), "a device", int(peak / 0.95) + 1)
    with pytest.raises(NapkinError, match=r"step needs .*device has"):
        refuse_far_too_much(ResolvedRecipe(large, PRECISION), "a device", int(0.98 * peak / 0.95))


def test_small_batches_are_left_to_the_count() -> None:
    refuse_far_too_much(ResolvedRecipe(recipe(8), PRECISION), "a device", 1)


@pytest.mark.thorough
def test_the_micro_batch_that_is_advised_fits_and_the_next_one_does_not() -> None:
    batch_size = 12
    memory = count_step(ResolvedRecipe(recipe(batch_size, 6), PRECISION)).peak_bytes
    with pytest.raises(NapkinError) as refused:
        refuse_far_too_much(ResolvedRecipe(recipe(batch_size), PRECISION), "a device", memory)
    found = re.search(r"--training.micro-batch-size (\d+) it needs ", str(refused.value))
    assert found
    advised = int(found[1])
    larger = min(size for size in range(advised + 1, batch_size + 1) if batch_size % size == 0)
    assert count_step(ResolvedRecipe(recipe(batch_size, advised), PRECISION)).peak_bytes <= 0.95 * memory
    assert count_step(ResolvedRecipe(recipe(batch_size, larger), PRECISION)).peak_bytes > 0.95 * memory


@pytest.mark.parametrize(
    ("memory_bytes", "way_out"),
    [
        (10_000, "no micro-batch size is small enough"),
        (3_000_000, "use a smaller --training.batch-size, --model.context-length"),
    ],
)
def test_where_no_micro_batch_helps_something_else_is_advised(memory_bytes: int, way_out: str) -> None:
    with pytest.raises(NapkinError, match=way_out):
        refuse_far_too_much(ResolvedRecipe(recipe(12), PRECISION), "a device", memory_bytes)
