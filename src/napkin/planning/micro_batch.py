"""Whether a step fits into the device's memory, and with which micro-batch it would."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable

from napkin.accounting.plan import Plan
from napkin.accounting.rules import adamw_bytes_rule, bytes_per_parameter, parameters_rule
from napkin.errors import NapkinError
from napkin.hardware.catalogue import catalogue
from napkin.hardware.cuda_target import Target
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.train_step.step import count_step
from napkin.units import format_bytes

# From so many tokens on, a step's peak grows with every token alike: the logits are at their full chunk.
_PROBE_TOKENS = 4096
# A micro-batch of more tokens takes minutes to trace: where it cannot fit anyway, that is said before.
_MANY_TOKENS = 2**17
_BYTES_OF_A_TOKEN = 8
"""Its id, its target and its document where they are separate, each int64: the whole batch is in memory, whatever the
micro-batch."""


def refuse_what_does_not_fit(recipe: Recipe, precision: Precision, plan: Plan) -> None:
    """Raise NapkinError, with a micro-batch that fits if there is one, where the plan exceeds the memory."""
    if not plan.fits:
        site = plan.site
        refused = _too_much(recipe, precision, plan.ledger.peak_bytes, site.device_name, site.memory_bytes, site.target)
        raise NapkinError("; ".join([str(refused), *_other_ways(plan)])) from None


def largest_micro_batch(
    recipe: Recipe, precision: Precision, memory_bytes: int, *, target: Target | None = None
) -> int:
    """The largest micro-batch that divides the batch and whose step fits, by count; 1 where none does.

    5% of the memory is left to what comes between the count and the run.
    """
    budget = int(0.95 * memory_bytes)
    sizes = _divisors(recipe.training.batch_size)
    peak_of = _peak_by_size(recipe, precision, target, accumulated=True)
    # The line runs a few percent off the count at most: it tells which sizes are worth counting.
    likely = bisect.bisect_right(sizes, 1.1 * budget, key=peak_of)
    for size in reversed(sizes[:likely]):
        tokens = size * recipe.model.context_length
        training = dataclasses.replace(recipe.training, micro_batch_size=size)
        exact = tokens <= _MANY_TOKENS
        peak = (
            count_step(dataclasses.replace(recipe, training=training), precision, target=target).peak_bytes
            if exact
            else peak_of(size)
        )
        if peak <= budget:
            return size
    return sizes[0]


def refuse_far_too_much(
    recipe: Recipe, precision: Precision, device_name: str, memory_bytes: int, *, target: Target | None = None
) -> None:
    """The same before the step is counted, for micro-batches so large that counting them takes long.

    Their peak follows from the counts of two small ones.
    """
    size = recipe.training.resolved_micro_batch_size
    if size * recipe.model.context_length > _MANY_TOKENS:
        needed = _peak_by_size(recipe, precision, target, accumulated=size < recipe.training.batch_size)(size)
        if needed > memory_bytes:
            raise _too_much(recipe, precision, needed, device_name, memory_bytes, target)


def _too_much(
    recipe: Recipe, precision: Precision, needed: int, device_name: str, memory_bytes: int, target: Target | None
) -> NapkinError:
    return NapkinError(
        f"a step needs {format_bytes(needed)}, {device_name} has {format_bytes(memory_bytes)} free: "
        f"{_way_out(recipe, precision, memory_bytes, target)}"
    )


def _other_ways(plan: Plan) -> list[str]:
    """What other devices, or the same ones otherwise, would make of a plan that does not fit."""
    site, peak, ways = plan.site, plan.ledger.peak_bytes, []
    if site.n_devices > 1 and not site.sharded:
        fits = "would fit" if plan.sharded_peak_bytes <= site.memory_bytes else "would not fit either"
        ways.append(
            f"parameters, gradients and optimizer state sharded over the {site.n_devices} devices it {fits}, with "
            f"{format_bytes(plan.sharded_peak_bytes)} each"
        )
    large_enough = [device for device in catalogue() if device.usable_bytes >= peak]
    if not site.measured and large_enough:
        smallest = min(large_enough, key=lambda device: device.memory_bytes)
        ways.append(f"as it is, it would fit a {smallest.name} of {format_bytes(smallest.advertised_bytes)}")
    return ways


def _way_out(recipe: Recipe, precision: Precision, memory_bytes: int, target: Target | None) -> str:
    model, training = recipe.model, recipe.training
    parameters = parameters_rule(
        vocab_size=model.vocab_size, d_model=model.d_model, n_layers=model.n_layers, tied=model.tie_embeddings
    )
    needed = adamw_bytes_rule(parameters, bytes_per_parameter=bytes_per_parameter(recipe.optimizer.name))
    if needed > memory_bytes:
        return "no micro-batch helps, use a smaller --model.d-model or --model.n-layers"
    peak_of = _peak_by_size(recipe, precision, target, accumulated=True)
    sizes = [size for size in _divisors(training.batch_size) if size < training.resolved_micro_batch_size]
    # The line may run a few percent below the count: what is advised should not be refused next.
    fitting = bisect.bisect_right(sizes, memory_bytes, key=lambda size: 1.05 * peak_of(size))
    if not fitting:
        return "use a smaller --training.batch-size, --model.context-length or --model.d-model"
    size = sizes[fitting - 1]
    return f"with --training.micro-batch-size {size} it needs about {format_bytes(peak_of(size))}"


def _peak_by_size(
    recipe: Recipe, precision: Precision, target: Target | None, *, accumulated: bool
) -> Callable[[int], int]:
    """The step's peak as a function of the micro-batch: on the line through the counts of two small ones.

    `accumulated` is whether a step has several, the gradients of all but the first being added. Smaller ones than
    those two are counted.
    """
    batch_size, context_length = recipe.training.batch_size, recipe.model.context_length
    # Activations grow with the tokens, however they are cut into sequences, where attention keeps no scores.
    keeps_scores = recipe.model.resolved_attention == "plain"
    probe_length = context_length if keeps_scores else min(context_length, _PROBE_TOKENS)
    probe_size = -(-_PROBE_TOKENS // probe_length)

    @functools.cache
    def count_peak(size: int, length: int) -> int:
        # All micro-batches from the second on are alike.
        counted = 2 * size if accumulated else size
        training = dataclasses.replace(recipe.training, batch_size=counted, micro_batch_size=size)
        model = dataclasses.replace(recipe.model, context_length=length)
        probe = dataclasses.replace(recipe, model=model, training=training)
        peak = count_step(probe, precision, target=target).peak_bytes
        bytes_of_a_token = (3 if recipe.data.separate_documents else 2) * _BYTES_OF_A_TOKEN
        return peak + (batch_size * context_length - counted * length) * bytes_of_a_token

    def peak_of(size: int) -> int:
        tokens, probe_tokens = size * context_length, probe_size * probe_length
        if tokens < probe_tokens:
            return count_peak(size, context_length)
        small, double = count_peak(probe_size, probe_length), count_peak(2 * probe_size, probe_length)
        return small + (tokens - probe_tokens) * (double - small) // probe_tokens

    return peak_of


def _divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
