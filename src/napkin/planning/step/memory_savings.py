"""Memory options: the peak memory and the seconds of a recipe's step with each of them, by count.

And whether a step fits, and with which micro-batch it would. All bytes are those of `count_step`, sharding included.
"""

import bisect
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from napkin.accounting.pricing import price
from napkin.accounting.rules import adamw_bytes_rule, bytes_per_parameter
from napkin.errors import NapkinError
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.device_file import catalogue
from napkin.kernels.loss.cross_entropy import CHUNK_SIZE as SMALLEST_CHUNK
from napkin.planning.rules import parameters_by_rule
from napkin.planning.step.run_plan import Plan
from napkin.planning.step.site import fits, memory_of, step_memory
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step_ledger import count_step
from napkin.units import format_bytes


@dataclass(frozen=True)
class MemoryOption:
    """One change of the recipe, and the step's cost with it."""

    fields: dict[str, Any]
    """Changed fields of [training], with their new values."""
    peak_bytes: int
    hardware_flops: int
    """FLOPs per step, recomputation included."""
    seconds: float
    """Seconds per step: the plan's, scaled by the ratio of the rooflines."""


def memory_options(
    plan: Plan,
    ceilings: Ceilings,
    *,
    host_bandwidth: float | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[MemoryOption]:
    """All memory options of a plan's recipe, each applied alone.

    `host_bandwidth` is that of a device's link to its host, in bytes per second, for offloading the optimizer.
    """
    base, options = price(plan.ledger, ceilings).seconds, []
    for fields in _changes(plan.resolved):
        progress(f"counting with {describe(fields)}")
        ledger = count_step(plan.resolved.with_training(**fields))
        seconds = plan.seconds_per_step * price(ledger, ceilings).seconds / base
        if "offload_optimizer" in fields and host_bandwidth:
            offloaded = plan.ledger if fields["offload_optimizer"] else ledger
            moved = 2 * offloaded.peak_by_category.get("optimizer state", 0) / host_bandwidth
            seconds += moved if fields["offload_optimizer"] else -moved
        options.append(MemoryOption(fields, ledger.peak_bytes, ledger.hardware_flops, seconds))
    return options


def describe(fields: dict[str, Any]) -> str:
    """Fields as a recipe has them, in one line; recompute_every is left out where it is 1."""
    return ", ".join(f"{name} = {value}" for name, value in fields.items() if (name, value) != ("recompute_every", 1))


def _changes(resolved: ResolvedRecipe) -> Iterator[dict[str, Any]]:
    recipe = resolved.per_device
    training = recipe.training
    size = training.resolved_micro_batch_size
    for smaller in dict.fromkeys((_divisors(size)[-2:][0], 1)):
        if smaller < size:
            yield {"micro_batch_size": smaller}
    # Ordered by the memory that they save.
    for what, every in (("none", 1), ("selective", 1), ("full", 2), ("full", 1)):
        is_set = (what, every) == (training.recompute, training.recompute_every)
        if not is_set and (every < recipe.model.n_layers or every == 1):
            yield {"recompute": what, "recompute_every": every}
    tokens = size * recipe.model.context_length
    chunk = training.resolved_loss_chunk_size
    if min(chunk, tokens) > SMALLEST_CHUNK:
        yield {"loss_chunk_size": SMALLEST_CHUNK}
    if chunk < tokens:
        yield {"loss_chunk_size": tokens}
    if resolved.precision.device_type != "cpu":
        yield {"offload_optimizer": not training.offload_optimizer}


# From this number of tokens on a step's peak is linear in the tokens: the logits fill a whole chunk.
_PROBE_TOKENS = 4096
# A micro-batch of more tokens takes minutes to trace: if it cannot fit anyway, it is refused before.
_MANY_TOKENS = 2**17
_BYTES_PER_TOKEN = 8
"""Bytes of a token id, a target or a document id (int64): the whole batch is in memory, whatever the micro-batch
size."""


def _peak_bytes(resolved: ResolvedRecipe) -> int:
    return count_step(resolved, reserved=False).peak_bytes


def refuse_what_does_not_fit(plan: Plan) -> None:
    """Raise NapkinError, naming settings that would fit, where the plan exceeds the memory."""
    if plan.fits:
        return
    site = plan.site
    ways = _with_less_at_a_time(plan.resolved, site.memory_bytes) + _sharded(plan)
    # A larger device in the place of the planned ones: of their vendor where that is known, and of several one that is
    # linked to others.
    vendor = next((device.vendor for device in catalogue() if device.name == site.device_name), None)
    large_enough = [
        device
        for device in catalogue()
        if fits(plan.peak_bytes, device.usable_bytes)
        and vendor in (None, device.vendor)
        and (site.n_devices == 1 or device.link_bandwidth is not None)
    ]
    if large_enough and not site.measured:
        least = min(large_enough, key=lambda device: device.memory_bytes)
        room = format_bytes(least.usable_bytes)
        ways.append(f"unchanged, it would fit a {least.name}, which has {room} for tensors")
    raise _too_much(plan.peak_bytes, site.device_name, plan.resolved, site.memory_bytes, ways)


def largest_micro_batch(resolved: ResolvedRecipe, memory_bytes: int) -> int:
    """The largest micro-batch that divides a device's batch and whose step fits, by count; 1 where none does."""
    sizes = _divisors(resolved.per_device.training.batch_size)
    largest = _largest_that_fits(resolved, sizes, memory_bytes)
    return sizes[0] if largest is None else largest[0]


def _largest_that_fits(resolved: ResolvedRecipe, sizes: list[int], memory_bytes: int) -> tuple[int, int] | None:
    """The largest of some micro-batch sizes whose step fits, and its peak; None where none does."""
    peak_of = _peak_by_size(resolved, accumulated=True)
    # The linear estimate is within a few percent of the count: only sizes that may fit are counted.
    likely = bisect.bisect_right(sizes, 1.1 * step_memory(memory_bytes), key=peak_of)
    for size in reversed(sizes[:likely]):
        exact = size * resolved.recipe.model.context_length <= _MANY_TOKENS
        peak = _peak_bytes(resolved.with_training(micro_batch_size=size)) if exact else peak_of(size)
        if fits(peak, memory_bytes):
            return size, peak
    return None


def refuse_far_too_much(resolved: ResolvedRecipe, device_name: str, memory_bytes: int) -> None:
    """Raise NapkinError before the step is counted, where its micro-batches are so large that counting takes long.

    Their peak is extrapolated from the counts of two small ones.
    """
    training = resolved.per_device.training
    size = training.resolved_micro_batch_size
    if size * resolved.recipe.model.context_length > _MANY_TOKENS:
        needed = _peak_by_size(resolved, accumulated=size < training.batch_size)(size)
        if not fits(needed, memory_bytes):
            ways = _with_less_at_a_time(resolved, memory_bytes)
            raise _too_much(needed, device_name, resolved, memory_bytes, ways)


def _too_much(
    needed: int, device_name: str, resolved: ResolvedRecipe, memory_bytes: int, ways: list[str]
) -> NapkinError:
    if not ways and not fits(_state_bytes(resolved), memory_bytes):
        ways = ["no micro-batch size is small enough, use a smaller --model.d-model or --model.n-layers"]
    elif not ways:
        ways = ["use a smaller --training.batch-size, --model.context-length or --model.d-model"]
    found = f"a step needs {format_bytes(needed)}, {memory_of(device_name, memory_bytes)}"
    return NapkinError(f"{found}: {'; '.join(ways)}")


def _with_less_at_a_time(resolved: ResolvedRecipe, memory_bytes: int) -> list[str]:
    """The largest smaller micro-batch that fits, if there is one."""
    if not fits(_state_bytes(resolved), memory_bytes):
        return []
    training = resolved.per_device.training
    sizes = [size for size in _divisors(training.batch_size) if size < training.resolved_micro_batch_size]
    largest = _largest_that_fits(resolved, sizes, memory_bytes)
    if largest is None:
        return []
    size, peak = largest
    return [f"with --training.micro-batch-size {size} it needs {format_bytes(peak)}"]


def _sharded(plan: Plan) -> list[str]:
    """The saving by fsdp for a plan of several devices that each hold the whole model."""
    if plan.resolved.strategy != "ddp":
        return []
    with_fsdp = "with --training.parallelism fsdp, which shards parameters, gradients and optimizer state over the "
    with_fsdp += f"{plan.site.n_devices} devices, it "
    memory_bytes = plan.site.memory_bytes
    for recompute in dict.fromkeys((plan.recipe.training.recompute, "full")):
        sharded = plan.resolved.with_training(parallelism="fsdp", recompute=recompute)
        peak = _peak_bytes(sharded)
        extra = "" if recompute == plan.recipe.training.recompute else " with --training.recompute full"
        if fits(peak, memory_bytes):
            return [f"{with_fsdp}fits{extra}, with {format_bytes(peak)} each"]
        less = _with_less_at_a_time(sharded, memory_bytes)
        if less:
            return [f"{with_fsdp}needs {format_bytes(peak)} each{extra}, and {less[0]}"]
    return []


def _state_bytes(resolved: ResolvedRecipe) -> float:
    """Bytes of weights, gradients and optimizer state that a device holds, by rule."""
    parameters = parameters_by_rule(resolved.recipe.model)
    state = adamw_bytes_rule(parameters, bytes_per_parameter=bytes_per_parameter(resolved.recipe.optimizer.name))
    return state / resolved.world_size if resolved.strategy == "fsdp" else state


def _peak_by_size(resolved: ResolvedRecipe, *, accumulated: bool) -> Callable[[int], int]:
    """The step's peak as a function of the micro-batch size: linear, through the counts of two small ones.

    `accumulated` is whether a step has several micro-batches, whose gradients are accumulated. Sizes below those two
    are counted.
    """
    batch_size, context_length = resolved.per_device.training.batch_size, resolved.recipe.model.context_length
    # Without attention scores, activations depend only on the number of tokens, not on the sequence length.
    holds_scores = resolved.recipe.model.resolved_attention in ("plain", "compiled")
    probe_length = context_length if holds_scores else min(context_length, _PROBE_TOKENS)
    probe_size = -(-_PROBE_TOKENS // probe_length)

    @functools.cache
    def count_peak(size: int, length: int) -> int:
        # All micro-batches from the second on are equal.
        counted = 2 * size if accumulated else size
        probe = resolved.with_model(context_length=length)
        probe = probe.with_training(batch_size=counted * resolved.world_size, micro_batch_size=size)
        bytes_per_token = (3 if resolved.recipe.data.separate_documents else 2) * _BYTES_PER_TOKEN
        return _peak_bytes(probe) + (batch_size * context_length - counted * length) * bytes_per_token

    def peak_of(size: int) -> int:
        tokens, probe_tokens = size * context_length, probe_size * probe_length
        if tokens < probe_tokens:
            return count_peak(size, context_length)
        small, double = count_peak(probe_size, probe_length), count_peak(2 * probe_size, probe_length)
        return small + (tokens - probe_tokens) * (double - small) // probe_tokens

    return peak_of


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
