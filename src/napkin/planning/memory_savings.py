"""Memory options: the peak memory and the seconds of a recipe's step with each of them, by count."""

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
    base, found = price(plan.ledger, ceilings).seconds, []
    for fields in _changes(plan.resolved):
        progress(f"counting with {describe(fields)}")
        ledger = count_step(plan.resolved.with_training(**fields))
        seconds = plan.seconds_per_step * price(ledger, ceilings).seconds / base
        if "offload_optimizer" in fields and host_bandwidth:
            offloaded = plan.ledger if fields["offload_optimizer"] else ledger
            moved = 2 * offloaded.peak_by_category.get("optimizer state", 0) / host_bandwidth
            seconds += moved if fields["offload_optimizer"] else -moved
        found.append(MemoryOption(fields, ledger.peak_bytes, ledger.hardware_flops, seconds))
    return found


def describe(fields: dict[str, Any]) -> str:
    """Fields as a recipe has them, in one line; recompute_every is left out where it is 1."""
    return ", ".join(f"{name} = {value}" for name, value in fields.items() if (name, value) != ("recompute_every", 1))


def _changes(resolved: ResolvedRecipe) -> Iterator[dict[str, Any]]:
    recipe = resolved.per_device
    training = recipe.training
    size = training.resolved_micro_batch_size
    for smaller in dict.fromkeys((_largest_proper_divisor(size), 1)):
        if smaller < size:
            yield {"micro_batch_size": smaller}
    settings = {("none", 1), ("selective", 1), ("full", 1), ("full", 2)}
    for what, every in sorted(settings - {(training.recompute, training.recompute_every)}, key=_by_memory_saved):
        if every < recipe.model.n_layers or every == 1:
            yield {"recompute": what, "recompute_every": every}
    tokens = size * recipe.model.context_length
    if training.loss_chunk_size < tokens:
        yield {"loss_chunk_size": tokens}
    if resolved.precision.device_type != "cpu":
        yield {"offload_optimizer": not training.offload_optimizer}


def _by_memory_saved(setting: tuple[str, int]) -> tuple[int, int]:
    what, every = setting
    return ("none", "selective", "full").index(what), -every


def _largest_proper_divisor(size: int) -> int:
    return next((size // factor for factor in range(2, size + 1) if size % factor == 0), size)
