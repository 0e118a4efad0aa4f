"""Whether a step fits into a device's memory, and the micro-batch size with which it would.

All bytes are those of `count_step`, sharding included.
"""

import bisect
import functools
import math
from collections.abc import Callable

from napkin.accounting.rules import adamw_bytes_rule, bytes_per_parameter, parameters_rule
from napkin.errors import NapkinError
from napkin.hardware.accelerators import catalogue
from napkin.planning.run_plan import Plan
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step_ledger import count_step
from napkin.units import format_bytes

# From this number of tokens on a step's peak is linear in the tokens: the logits fill a whole chunk.
_PROBE_TOKENS = 4096
# A micro-batch of more tokens takes minutes to trace: if it cannot fit anyway, it is refused before.
_MANY_TOKENS = 2**17
_BYTES_PER_TOKEN = 8
"""Of a token id, a target or a document id (int64): the whole batch is in memory, whatever the micro-batch size."""


def refuse_what_does_not_fit(plan: Plan) -> None:
    """Raise NapkinError, naming a micro-batch size that fits if there is one, where the plan exceeds the memory."""
    if not plan.fits:
        site = plan.site
        refused = _too_much(plan.resolved, plan.ledger.peak_bytes, site.device_name, site.memory_bytes)
        raise NapkinError("; ".join([str(refused), *_other_ways(plan)])) from None


def largest_micro_batch(resolved: ResolvedRecipe, memory_bytes: int) -> int:
    """The largest micro-batch that divides a device's batch and whose step fits, by count; 1 where none does.

    5% of the memory is left free, for the difference between count and run.
    """
    budget = int(0.95 * memory_bytes)
    sizes = _divisors(resolved.per_device.training.batch_size)
    peak_of = _peak_by_size(resolved, accumulated=True)
    # The linear estimate is within a few percent of the count: only sizes that may fit are counted.
    likely = bisect.bisect_right(sizes, 1.1 * budget, key=peak_of)
    for size in reversed(sizes[:likely]):
        exact = size * resolved.recipe.model.context_length <= _MANY_TOKENS
        peak = count_step(resolved.with_training(micro_batch_size=size)).peak_bytes if exact else peak_of(size)
        if peak <= budget:
            return size
    return sizes[0]


def refuse_far_too_much(resolved: ResolvedRecipe, device_name: str, memory_bytes: int) -> None:
    """Raise NapkinError before the step is counted, where its micro-batches are so large that counting takes long.

    Their peak is extrapolated from the counts of two small ones.
    """
    training = resolved.per_device.training
    size = training.resolved_micro_batch_size
    if size * resolved.recipe.model.context_length > _MANY_TOKENS:
        needed = _peak_by_size(resolved, accumulated=size < training.batch_size)(size)
        if needed > memory_bytes:
            raise _too_much(resolved, needed, device_name, memory_bytes)


def _too_much(resolved: ResolvedRecipe, needed: int, device_name: str, memory_bytes: int) -> NapkinError:
    return NapkinError(
        f"a step needs {format_bytes(needed)}, {device_name} has {format_bytes(memory_bytes)} free: "
        f"{_way_out(resolved, memory_bytes)}"
    )


def _other_ways(plan: Plan) -> list[str]:
    """Other devices, or other settings on the same ones, with which a plan that does not fit would fit."""
    site, ways = plan.site, []
    if plan.resolved.strategy == "ddp":
        sharded = count_step(plan.resolved.with_training(parallelism="fsdp")).peak_bytes
        fits = "fits" if sharded <= site.memory_bytes else "does not fit either"
        ways.append(
            f"with --training.parallelism fsdp, which shards parameters, gradients and optimizer state over the "
            f"{site.n_devices} devices, it {fits}, with {format_bytes(sharded)} each"
        )
    large_enough = [device for device in catalogue() if device.usable_bytes >= plan.ledger.peak_bytes]
    if not site.measured and large_enough:
        smallest = min(large_enough, key=lambda device: device.memory_bytes)
        ways.append(f"as it is, it would fit a {smallest.name} of {format_bytes(smallest.advertised_bytes)}")
    return ways


def _way_out(resolved: ResolvedRecipe, memory_bytes: int) -> str:
    model, training = resolved.recipe.model, resolved.per_device.training
    parameters = parameters_rule(
        vocab_size=model.vocab_size, d_model=model.d_model, n_layers=model.n_layers, tied=model.tie_embeddings
    )
    state = adamw_bytes_rule(parameters, bytes_per_parameter=bytes_per_parameter(resolved.recipe.optimizer.name))
    if (state / resolved.world_size if resolved.strategy == "fsdp" else state) > memory_bytes:
        return "no micro-batch size is small enough, use a smaller --model.d-model or --model.n-layers"
    peak_of = _peak_by_size(resolved, accumulated=True)
    sizes = [size for size in _divisors(training.batch_size) if size < training.resolved_micro_batch_size]
    # The estimate may be a few percent below the count: the advised size must not be refused afterwards.
    fitting = bisect.bisect_right(sizes, memory_bytes, key=lambda size: 1.05 * peak_of(size))
    if not fitting:
        return "use a smaller --training.batch-size, --model.context-length or --model.d-model"
    size = sizes[fitting - 1]
    return f"with --training.micro-batch-size {size} it needs about {format_bytes(peak_of(size))}"


def _peak_by_size(resolved: ResolvedRecipe, *, accumulated: bool) -> Callable[[int], int]:
    """The step's peak as a function of the micro-batch size: linear, through the counts of two small ones.

    `accumulated` is whether a step has several micro-batches, whose gradients are accumulated. Sizes below those two
    are counted.
    """
    batch_size, context_length = resolved.per_device.training.batch_size, resolved.recipe.model.context_length
    # Without attention scores, activations depend only on the number of tokens, not on the sequence length.
    keeps_scores = resolved.recipe.model.resolved_attention == "plain"
    probe_length = context_length if keeps_scores else min(context_length, _PROBE_TOKENS)
    probe_size = -(-_PROBE_TOKENS // probe_length)

    @functools.cache
    def count_peak(size: int, length: int) -> int:
        # All micro-batches from the second on are equal.
        counted = 2 * size if accumulated else size
        probe = resolved.with_model(context_length=length)
        probe = probe.with_training(batch_size=counted * resolved.world_size, micro_batch_size=size)
        bytes_per_token = (3 if resolved.recipe.data.separate_documents else 2) * _BYTES_PER_TOKEN
        return count_step(probe).peak_bytes + (batch_size * context_length - counted * length) * bytes_per_token

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
