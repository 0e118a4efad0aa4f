"""A slice of a model, two of its layers at full width, trains for a few steps: the last microbenchmark before a run.

Operators that are run alone find their tensors in the cache, and nobody between them; in a step autograd and Python
stand between, and tensors have gone cold. What a slice takes beside its operators alone is what the whole takes, too.
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
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.train_step.step import build_train_state, count_step

LAYERS = 2
WARM_UP_STEPS = 2
STEPS = range(3, 12)
"""Fewest and most steps that are timed; between them, as many as take `SECONDS`."""
SECONDS = 0.8
MOST_SECONDS = 8.0
"""A slice that would take longer in all is left out."""

SLICED_FACTOR = 1.45
"""How far off a step's seconds are, in nine cases of ten, where a slice was timed: benchmarks/step_seconds.py."""
ALONE_FACTOR = 2.0
"""The same where the operators alone were: the Python between them weighs most in small steps."""


def time_slice(
    recipe: Recipe,
    precision: Precision,
    ceilings: Ceilings,
    timed: Mapping[Hashable, float],
    *,
    max_bytes: int,
) -> tuple[float, float]:
    """How much longer a step takes than its operators alone, and how far off that prediction may be, as a factor.

    Takes a second or so, and at most `max_bytes`; where the slice wants more time or memory than is worth it, nothing
    is run, and the answer is (1, `ALONE_FACTOR`).
    """
    slice_of = _slice(recipe)
    ledger = count_step(slice_of, precision)

    def expected(row: Row) -> float:
        return roofline_seconds(row, ceilings)

    known = time_operators(ledger, expected, device_type=precision.device_type, known=timed, max_bytes=max_bytes)
    alone = price(ledger, ceilings, known).seconds
    if ledger.peak_bytes > max_bytes or alone * (WARM_UP_STEPS + STEPS.start) > MOST_SECONDS:
        return 1.0, ALONE_FACTOR
    return statistics.median(_steps(slice_of, precision)) / alone, SLICED_FACTOR


def _slice(recipe: Recipe) -> Recipe:
    training = recipe.training
    # All micro-batches from the second on are alike.
    batch_size = min(training.batch_size, 2 * training.resolved_micro_batch_size)
    # Layers with experts come after the dense ones.
    layers = max(LAYERS, recipe.model.n_dense_layers + 1)
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, n_layers=min(layers, recipe.model.n_layers)),
        training=dataclasses.replace(training, batch_size=batch_size),
    )


def _steps(recipe: Recipe, precision: Precision) -> list[float]:
    """Seconds of each timed step, on random tokens; the global random state is left as it was."""
    devices = [0] if precision.device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return _train(recipe, precision)


def _train(recipe: Recipe, precision: Precision) -> list[float]:
    train_state = build_train_state(recipe, precision)
    generator = torch.Generator().manual_seed(0)
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator).to(precision.device_type)
    batch = (tokens, tokens, torch.zeros_like(tokens)) if recipe.data.separate_documents else (tokens, tokens)
    taken: list[float] = []
    for number in range(WARM_UP_STEPS + STEPS.stop):
        begin = time.perf_counter()
        train_state.step(number, *batch)
        if precision.device_type == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP_STEPS:
            taken.append(time.perf_counter() - begin)
        if len(taken) >= STEPS.start and sum(taken) > SECONDS:
            break
    return taken
