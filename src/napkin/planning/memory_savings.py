"""Memory options: what each would save of a recipe's peak, and what it would cost, by counting the step with it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from napkin.accounting.pricing import price
from napkin.hardware.ceilings import Ceilings
from napkin.planning.run_plan import Plan
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step_ledger import count_step


@dataclass(frozen=True)
class MemoryOption:
    """One change of the recipe, and the step with it."""

    fields: dict[str, Any]
    """Fields of the recipe's table `training`, and what they would be."""
    peak_bytes: int
    hardware_flops: int
    """Of a step, recomputation counted."""
    seconds: float
    """Of a step: the plan's, longer by as much as its rooflines are."""


def memory_options(
    plan: Plan,
    ceilings: Ceilings,
    *,
    host_bandwidth: float | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[MemoryOption]:
    """Each memory option that a plan's recipe has, taken alone.

    `host_bandwidth` is that of a device's link to its host, in bytes per second: what crosses it takes time.
    """
    base, found = price(plan.ledger, ceilings).seconds, []
    for fields in _changes(plan.resolved):
        progress(f"counting with {describe(fields)}")
        ledger = count_step(plan.resolved.with_training(**fields))
        seconds = plan.seconds_per_step * price(ledger, ceilings).seconds / base
        if "offload_optimizer" in fields and host_bandwidth:
            holder = plan.ledger if fields["offload_optimizer"] else ledger
            moved = 2 * holder.peak_by_category.get("optimizer state", 0) / host_bandwidth
            seconds += moved if fields["offload_optimizer"] else -moved
        found.append(MemoryOption(fields, ledger.peak_bytes, ledger.hardware_flops, seconds))
    return found


def describe(fields: dict[str, Any]) -> str:
    """Fields as a recipe has them, in one line; every block alike needs no mention."""
    return ", ".join(f"{name} = {value}" for name, value in fields.items() if (name, value) != ("recompute_every", 1))


def _changes(resolved: ResolvedRecipe) -> Iterator[dict[str, Any]]:
    recipe = resolved.per_device
    training = recipe.training
    size = training.resolved_micro_batch_size
    for smaller in dict.fromkeys((_largest_proper_divisor(size), 1)):
        if smaller < size:
            yield {"micro_batch_size": smaller}
    settings = {("none", 1), ("selective", 1), ("full", 1), ("full", 2)}
    for what, every in sorted(settings - {(training.recompute, training.recompute_every)}, key=_by_thrift):
        if every < recipe.model.n_layers or every == 1:
            yield {"recompute": what, "recompute_every": every}
    tokens = size * recipe.model.context_length
    if training.loss_chunk_size < tokens:
        yield {"loss_chunk_size": tokens}
    if resolved.precision.device_type != "cpu":
        yield {"offload_optimizer": not training.offload_optimizer}


def _by_thrift(setting: tuple[str, int]) -> tuple[int, int]:
    what, every = setting
    return ("none", "selective", "full").index(what), -every


def _largest_proper_divisor(size: int) -> int:
    return next((size // factor for factor in range(2, size + 1) if size % factor == 0), size)
