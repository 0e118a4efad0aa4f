"""A shorter run is shorter as a whole: its schedule and its mixture have the shape of the long one's."""

import dataclasses

import pytest

from napkin.errors import NapkinError
from napkin.optim.registry import SCHEDULES
from napkin.recipe.data_config import DataConfig, read_curriculum
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.scaling.trials import with_values

CURRICULUM = ("300 a=1 b=2", "301 b=1", "700 a=1")


def recipe(steps: int = 800, **optimizer: object) -> Recipe:
    return Recipe(
        data=DataConfig(train=("a", "b"), curriculum=CURRICULUM),
        optimizer=OptimizerConfig(**optimizer),  # pyright: ignore[reportArgumentType]
        training=TrainingConfig(steps=steps),
    )


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_fits_into_every_shorter_run(schedule: str) -> None:
    # Warm-up and decay fill the run but for one step: nothing is left over where they are rounded.
    fields = {"decay_steps": 749} if schedule == "warmup-stable-decay" else {}
    long = recipe(schedule=schedule, warmup_steps=50, **fields)
    for steps in range(1, 801):
        short = long.of_steps(steps)
        assert short.training.steps == steps
        assert short.warmup_steps == 50 * steps // 800
        assert short.optimizer.decay_steps == (749 * steps // 800 if fields else None)
        begins = [begin for begin, _ in read_curriculum(short.data.curriculum, ("a", "b"))]
        exact = [begin * steps / 800 for begin in (300, 301, 700)]
        assert begins == sorted(set(begins))
        assert all(abs(begin - wanted) <= 3 for begin, wanted in zip(begins, exact, strict=True))


def test_a_half_of_a_run_has_its_learning_rates_at_half_the_steps() -> None:
    long = recipe(1600, schedule="warmup-stable-decay", warmup_steps=200, decay_steps=400)
    short = long.of_steps(800)
    for step in range(0, 800, 7):
        assert short.schedule(step, 1.0) == pytest.approx(long.schedule(2 * step, 1.0), abs=0.01)


def test_a_longer_run_keeps_what_is_counted_in_steps() -> None:
    long = recipe(warmup_steps=50).of_steps(8000)
    assert (long.training.steps, long.warmup_steps, long.data.curriculum) == (8000, 50, CURRICULUM)
    assert recipe().of_steps(100).optimizer.warmup_steps is None


def test_where_the_schedule_fits_only_the_steps_change() -> None:
    base = recipe(warmup_steps=50)
    assert base.with_steps(51).warmup_steps == 50
    assert base.with_steps(51).data == base.data
    assert base.with_steps(50).warmup_steps == 3
    with pytest.raises(NapkinError, match="steps"):
        base.with_steps(0)


def test_a_run_of_a_sweep_is_shortened_unless_the_sweep_says_how() -> None:
    base = recipe(warmup_steps=50)
    assert with_values(base, {"training.steps": 28}).warmup_steps == 1
    assert with_values(base, {"training.steps": 28, "optimizer.warmup_steps": 7}).warmup_steps == 7
    with pytest.raises(NapkinError, match=r"warmup_steps 30 .*28"):
        with_values(base, {"training.steps": 28, "optimizer.warmup_steps": 30})
    assert with_values(base, {"training.batch_size": 3}) == dataclasses.replace(
        base, training=dataclasses.replace(base.training, batch_size=3)
    )
