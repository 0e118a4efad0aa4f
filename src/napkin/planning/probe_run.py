"""A probe run: two layers of the model at full width train for a few steps, before the run itself.

Operators that are timed alone have their tensors in the cache and no overhead between them; in a step autograd and
Python run in between, and the tensors have left the cache. The overhead of the probe run relative to its operators is
taken as that of the whole model.
"""

import dataclasses
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.microbenchmark import time_operators
from napkin.accounting.pricing import price, roofline_seconds
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.competition import Sample, Sampler
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import build_train_state
from napkin.train_step.step_ledger import count_step

LAYERS = 2
WARM_UP_STEPS = 2
STEPS = range(3, 12)
"""Fewest and most steps that are timed; between the two, as many as take `SECONDS`."""
SECONDS = 0.8
MOST_SECONDS = 8.0
"""A probe run that would take longer than this in all is not made."""

PROBED_FACTOR = 1.045
"""Error of the predicted seconds, as a factor, in nine cases of ten with a probe run whose steps all take equally long:
what benchmarks/step_seconds.py finds on a quiet machine. What varies comes on top."""
DISTURBED_FACTOR = 1.2
"""The same for a machine that other processes were using while it was calibrated or the step was timed."""
NINE_IN_TEN = 1.645
"""Standard deviations on either side that nine in ten of a normal distribution lie within."""
REPEAT_SECONDS = 0.3
"""Of timing the largest operators once more."""
UNPROBED_FACTOR = 2.0
"""The same where only operators were timed: the Python between them weighs most in small steps."""


def time_probe_run(
    resolved: ResolvedRecipe,
    counted: Ledger,
    ceilings: Ceilings,
    timed: Mapping[Hashable, float],
    *,
    max_bytes: int,
    sampler: Sampler,
    disturbed: bool = False,
) -> tuple[float, float]:
    """The ratio of a step's seconds to those of its operators timed alone, and the expected error as a factor.

    Takes about a second, and at most `max_bytes`. Where the probe run would take too much time or memory, nothing is
    run and (1, `UNPROBED_FACTOR`) is returned. `counted` is the ledger of the step, `timed` are the operator calls
    whose seconds are already known; `sampler`, which is in use, times steps and calls; `disturbed` is whether other
    processes were running while `ceilings` were measured.
    """
    probe = _probe(resolved)
    ledger = counted if probe == resolved else count_step(probe)

    def expected(row: Row) -> float:
        return roofline_seconds(row, ceilings)

    def timing(**further: Any) -> Mapping[Hashable, float]:
        device_type = probe.precision.device_type
        return time_operators(
            ledger, expected, device_type=device_type, max_bytes=max_bytes, sampler=sampler, **further
        )

    known = timing(known=timed)
    alone = price(ledger, ceilings, known).seconds
    if ledger.peak_bytes > max_bytes or alone * (WARM_UP_STEPS + STEPS.start) > MOST_SECONDS:
        return 1.0, UNPROBED_FACTOR
    steps = _steps(probe, sampler)
    # The largest operators once more: seconds have passed, and what they take now shows how much the machine wavers.
    again = timing(max_seconds=REPEAT_SECONDS)
    conditions = sampler.conditions()
    disturbed = disturbed or (conditions is not None and conditions.busy)
    factor = stated_factor(sampler.undisturbed(steps), _drift(ledger, known, again), disturbed=disturbed)
    return sampler.seconds(steps) / alone, factor


def stated_factor(steps: Sequence[float], drift: float, *, disturbed: bool) -> float:
    """The factor that a step's seconds are expected to stay within, in nine cases of ten.

    Args:
        steps: seconds of the probe run's steps, which are alike.
        drift: how much longer the same operators took the second time, as a factor.
        disturbed: whether other processes were running while the machine was calibrated, or the steps were timed.
    """
    middle = statistics.median(steps)
    # The median distance from the median: one slow step is no reason for a wide interval. 1.4826 makes it a standard
    # deviation.
    spread = 1.4826 * statistics.median(abs(taken / middle - 1) for taken in steps)
    parts = [math.log(PROBED_FACTOR), NINE_IN_TEN * spread, NINE_IN_TEN * math.log(drift)]
    if disturbed:
        parts.append(math.log(DISTURBED_FACTOR))
    return min(UNPROBED_FACTOR, math.exp(math.hypot(*parts)))


def _drift(ledger: Ledger, first: Mapping[Hashable, float], again: Mapping[Hashable, float]) -> float:
    """Seconds of the calls that were timed twice, the second time over the first."""
    twice = [row.call for row in ledger.rows if row.call in first and row.call in again]
    before, after = (sum(seconds[call] for call in twice) for seconds in (first, again))
    return after / before if before and after else 1.0


def _probe(resolved: ResolvedRecipe) -> ResolvedRecipe:
    recipe = resolved.per_device
    # All micro-batches from the second on are equal.
    batch_size = min(recipe.training.batch_size, 2 * recipe.training.resolved_micro_batch_size)
    # Layers with experts come after the dense ones.
    layers = min(max(LAYERS, recipe.model.n_dense_layers + 1), recipe.model.n_layers)
    alone = dataclasses.replace(resolved, recipe=recipe, world_size=1)
    return alone.with_model(n_layers=layers).with_training(batch_size=batch_size)


def _steps(resolved: ResolvedRecipe, sampler: Sampler) -> list[Sample]:
    """Timed steps on random tokens; the global random state is unchanged."""
    devices = [0] if resolved.precision.device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return _train(resolved, sampler)


def _train(resolved: ResolvedRecipe, sampler: Sampler) -> list[Sample]:
    recipe, device_type = resolved.recipe, resolved.precision.device_type
    train_state = build_train_state(resolved)
    generator = torch.Generator().manual_seed(0)
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator).to(device_type)
    batch = (tokens, tokens, torch.zeros_like(tokens)) if recipe.data.separate_documents else (tokens, tokens)
    taken: list[Sample] = []
    for number in range(WARM_UP_STEPS + STEPS.stop):
        sample = sampler.sample(lambda number=number: train_state.step(number, *batch))
        if number >= WARM_UP_STEPS:
            taken.append(sample)
        if len(taken) >= STEPS.start and sum(sampler.undisturbed(taken)) > SECONDS:
            break
    return taken
