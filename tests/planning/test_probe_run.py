import math
import statistics
from random import Random

import pytest
import torch

from napkin.accounting.pricing import price
from napkin.hardware.calibration import ArrayMeasurement, Calibration, Machine, MatmulMeasurement
from napkin.hardware.competition import Sample, Sampler, Watch
from napkin.hardware.conditions import Conditions
from napkin.model.config import ModelConfig
from napkin.planning.step.machine import (
    DISTURBED_FACTOR,
    PROBED_FACTOR,
    UNPROBED_FACTOR,
    _timed_steps,
    stated_factor,
    time_probe_run,
)
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step
from oracles.clock import ProcessorClock

PRECISION = Precision("fp32", "cpu")


def calibration(flops_per_second: float) -> Calibration:
    return Calibration(
        machine=Machine("cpu", "a CPU", 1, 1, False, "2"),
        measured_at="2026-11-20T00:00:00+00:00",
        matmuls=(MatmulMeasurement("fp32", 256, 256, 256, flops_per_second),),
        arrays=(ArrayMeasurement(2**20, 1e12, 1e12), ArrayMeasurement(2**26, 1e12, 1e12)),
        seconds_per_operator=1e-9,
        seconds_per_fresh_byte=0.0,
    )


def recipe(n_layers: int = 4, batch_size: int = 8) -> Recipe:
    model = ModelConfig(vocab_size=64, context_length=16, d_model=16, n_layers=n_layers, n_heads=2)
    return Recipe(model=model, training=TrainingConfig(batch_size=batch_size, micro_batch_size=2))


def probe_run(recipe: Recipe, ceilings: Calibration, *, max_bytes: int) -> tuple[float, float]:
    resolved = ResolvedRecipe(recipe, PRECISION)
    with Sampler() as sampler:
        return time_probe_run(resolved, count_step(resolved), ceilings, {}, max_bytes=max_bytes, sampler=sampler)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("asked", [recipe(), recipe(n_layers=2, batch_size=4)])
def test_a_step_of_two_layers_and_two_micro_batches_is_compared_with_its_operators_alone(
    asked: Recipe, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ProcessorClock(1e-3, others=others)
    monkeypatch.setattr("napkin.hardware.timing.time", clock)
    monkeypatch.setattr(Watch, "conditions", lambda self, **_: Conditions(2, 2, float(others > 0)))
    steps: list[float] = []

    def train(resolved: ResolvedRecipe, sampler: Sampler) -> list[Sample]:
        clock.seconds_per_call = 0.3
        taken = _timed_steps(resolved, sampler)
        clock.seconds_per_call = 1e-3
        steps.extend(sample.clock for sample in taken)
        return taken

    monkeypatch.setattr("napkin.planning.step.machine._timed_steps", train)
    ceilings = calibration(1e15)
    between, factor = probe_run(asked, ceilings, max_bytes=2**30)
    # Every operator takes a millisecond alone, as it is timed, and a step three tenths of a second, without others.
    ledger = count_step(ResolvedRecipe(recipe(n_layers=2, batch_size=4), PRECISION))
    alone = price(ledger, ceilings, {row.call: 1e-3 for row in ledger.rows if row.bytes_read + row.bytes_written})
    assert between == pytest.approx(0.3 / alone.seconds)
    certain = [math.log(PROBED_FACTOR), *([math.log(DISTURBED_FACTOR)] if others else [])]
    assert factor == pytest.approx(math.exp(math.hypot(*certain)))
    assert steps == pytest.approx([0.3 * (1 + others)] * 3)


def test_the_stated_factor_is_what_was_found_on_this_machine_for_this_shape() -> None:
    steady = [0.1] * 7
    assert stated_factor(steady, 1.0, disturbed=False) == pytest.approx(PROBED_FACTOR)
    one_slow = [*steady, 0.9]
    assert stated_factor(one_slow, 1.0, disturbed=False) == pytest.approx(PROBED_FACTOR)
    wavering = [0.1, 0.105, 0.095, 0.11, 0.09]
    found = stated_factor(wavering, 1.0, disturbed=False)
    assert found == pytest.approx(math.exp(math.hypot(math.log(PROBED_FACTOR), 1.645 * 1.4826 * 0.05)))
    longer, shorter = (stated_factor(steady, drift, disturbed=False) for drift in (1.1, 1 / 1.1))
    assert longer == pytest.approx(shorter)
    assert longer > 1.1
    assert stated_factor(wavering, 1.1, disturbed=False) > found
    assert stated_factor(wavering, 1.0, disturbed=True) > found
    assert stated_factor(steady, 1.0, disturbed=True) > DISTURBED_FACTOR
    assert stated_factor([0.1, 0.5, 0.9], 9.0, disturbed=True) == UNPROBED_FACTOR


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.1])
def test_nine_in_ten_steps_are_within_the_stated_factor(spread: float) -> None:
    random = Random(0)
    covered = 0
    for _ in range(1000):
        # The machine's level moves between the plan and the run, as it does between the two timings of operators.
        first, second, later = (math.exp(random.gauss(0, spread / 2)) for _ in range(3))
        steps = [second * math.exp(random.gauss(0, spread)) for _ in range(9)]
        factor = stated_factor(steps, second / first, disturbed=False)
        error = math.exp(random.gauss(0, math.log(PROBED_FACTOR) / 1.645))
        run = statistics.median(later * math.exp(random.gauss(0, spread)) for _ in range(12))
        ratio = error * run / statistics.median(steps)
        covered += 1 / factor <= ratio <= factor
    assert 850 <= covered <= 950


def test_a_probe_run_that_would_take_too_long_or_too_much_memory_is_left_out() -> None:
    assert probe_run(recipe(), calibration(1e15), max_bytes=1000) == (1.0, UNPROBED_FACTOR)
    assert probe_run(recipe(), calibration(1e2), max_bytes=50) == (1.0, UNPROBED_FACTOR)


def test_a_probe_run_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    probe_run(recipe(1), calibration(1e15), max_bytes=2**30)
    assert torch.equal(state, torch.get_rng_state())
