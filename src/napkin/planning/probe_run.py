"""A probe run: two layers of the model at full width train for a few steps, before the run itself.

Operators that are timed alone have their tensors in the cache and no overhead between them; in a step autograd and
Python run in between, and the tensors have left the cache. The overhead of the probe run relative to its operators is
taken as that of the whole model.
"""

import dataclasses
import statistics
import time
from collections.abc import Hashable, Mapping

import torch

from napkin.accounting.ledger import Row
from napkin.accounting.microbenchmark import time_operators
from napkin.accounting.pricing import price, roofline_seconds
from napkin.hardware.ceilings import Ceilings
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

PROBED_FACTOR = 1.45
"""Error of the predicted seconds, as a factor, in nine cases of ten with a probe run: benchmarks/step_seconds.py."""
UNPROBED_FACTOR = 2.0
"""The same where only operators were timed: the Python between them weighs most in small steps."""


def time_probe_run(
    resolved: ResolvedRecipe, ceilings: Ceilings, timed: Mapping[Hashable, float], *, max_bytes: int
) -> tuple[float, float]:
    """The ratio of a step's seconds to those of its operators timed alone, and the expected error as a factor.

    Takes about a second, and at most `max_bytes`. Where the probe run would take too much time or memory, nothing is
    run and (1, `UNPROBED_FACTOR`) is returned. `timed` are the operator calls whose seconds are already known.
    """
    probe = _probe(resolved)
    ledger = count_step(probe)

    def expected(row: Row) -> float:
        return roofline_seconds(row, ceilings)

    known = time_operators(ledger, expected, device_type=probe.precision.device_type, known=timed, max_bytes=max_bytes)
    alone = price(ledger, ceilings, known).seconds
    if ledger.peak_bytes > max_bytes or alone * (WARM_UP_STEPS + STEPS.start) > MOST_SECONDS:
        return 1.0, UNPROBED_FACTOR
    return statistics.median(_steps(probe)) / alone, PROBED_FACTOR


def _probe(resolved: ResolvedRecipe) -> ResolvedRecipe:
    recipe = resolved.per_device
    # All micro-batches from the second on are equal.
    batch_size = min(recipe.training.batch_size, 2 * recipe.training.resolved_micro_batch_size)
    # Layers with experts come after the dense ones.
    layers = min(max(LAYERS, recipe.model.n_dense_layers + 1), recipe.model.n_layers)
    alone = dataclasses.replace(resolved, recipe=recipe, world_size=1)
    return alone.with_model(n_layers=layers).with_training(batch_size=batch_size)


def _steps(resolved: ResolvedRecipe) -> list[float]:
    """Seconds of each timed step, on random tokens; the global random state is unchanged."""
    devices = [0] if resolved.precision.device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return _train(resolved)


def _train(resolved: ResolvedRecipe) -> list[float]:
    recipe, device_type = resolved.recipe, resolved.precision.device_type
    train_state = build_train_state(resolved)
    generator = torch.Generator().manual_seed(0)
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator).to(device_type)
    batch = (tokens, tokens, torch.zeros_like(tokens)) if recipe.data.separate_documents else (tokens, tokens)
    taken: list[float] = []
    for number in range(WARM_UP_STEPS + STEPS.stop):
        begin = time.perf_counter()
        train_state.step(number, *batch)
        if device_type == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP_STEPS:
            taken.append(time.perf_counter() - begin)
        if len(taken) >= STEPS.start and sum(taken) > SECONDS:
            break
    return taken
