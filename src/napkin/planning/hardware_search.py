"""The fewest devices of a kind that finish a run in time, and the most that its budget allows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from napkin.errors import NapkinError
from napkin.planning.layout_costs import LayoutCosts
from napkin.planning.layout_plan import LayoutPlan
from napkin.planning.layout_search import search_layouts
from napkin.planning.machine import CatalogueMachine
from napkin.units import format_seconds

MOST_DEVICES = 16384
_BEST_MFU = 0.7
"""No run is faster: with fewer devices than that needs, none is searched."""


@dataclass(frozen=True)
class Tried:
    """The fastest layout of a number of devices."""

    n_devices: int
    machine: CatalogueMachine
    plan: LayoutPlan
    seconds: float
    """Of all steps."""
    dollars: float | None


def least_hardware(
    costs: LayoutCosts,
    *,
    within_seconds: float | None = None,
    for_usd: float | None = None,
    most: int = MOST_DEVICES,
    trains: bool = True,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[Tried]:
    """The numbers of devices that were tried, the answer last.

    Numbers are parts of a node, then 1, 2, 3, 4, 6, 8, 12, ... nodes. With a deadline, the answer is the first that
    meets it, and stays within the budget, if there is one too; with a budget alone, the fastest that stays within it.

    Args:
        costs: of the recipe on any number of the devices.
        within_seconds: the deadline for all steps.
        for_usd: the budget for all steps.
        most: devices at most.
        trains: as `search_layouts` takes it.
        progress: called with what is searched.

    Raises:
        NapkinError: where no number of devices is enough, and what the nearest is.
    """
    tried: list[Tried] = []
    for n_devices in device_counts(costs.interconnect.devices_per_node, most):
        if within_seconds is not None and _least_seconds(costs, n_devices) > within_seconds:
            continue
        machine = CatalogueMachine(
            costs.machine.device, n_devices, node=costs.machine.node, efficiency=costs.machine.efficiency
        )
        progress(f"searching layouts of {n_devices:,} devices")
        try:
            plan = search_layouts(costs.on(machine), best=1, trains=trains).plans[0]
        except NapkinError:
            continue
        seconds = plan.resolved.recipe.training.steps * plan.seconds
        tried.append(Tried(n_devices, machine, plan, seconds, plan.dollars))
        if within_seconds is not None and seconds <= within_seconds:
            return _affordable(tried, for_usd)
        if within_seconds is None and plan.dollars is not None and for_usd is not None and plan.dollars > 1.5 * for_usd:
            break
    if within_seconds is not None:
        raise NapkinError(_too_late(costs, tried, within_seconds, most))
    return _fastest_within(costs, tried, for_usd, most)


def device_counts(per_node: int, most: int) -> Iterator[int]:
    """Parts of a node that are powers of two, then nodes: powers of two, and 1.5 times those."""
    found = {2**power for power in range(per_node.bit_length()) if 2**power < per_node}
    nodes = {factor * 2**power for power in range(32) for factor in (1, 3)}
    found |= {per_node * number for number in nodes if per_node * number <= most}
    return iter(sorted(number for number in found if number <= most))


def _least_seconds(costs: LayoutCosts, n_devices: int) -> float:
    training = costs.resolved.recipe.training
    rate = n_devices * costs.site.matmul_peak * _BEST_MFU
    return training.steps * costs.model_flops(training.batch_size) / rate


def _affordable(tried: list[Tried], for_usd: float | None) -> list[Tried]:
    last = tried[-1]
    if for_usd is not None and last.dollars is not None and last.dollars > for_usd:
        raise NapkinError(
            f"the first that is in time, {last.n_devices:,} devices, takes {format_seconds(last.seconds)} and costs "
            f"${last.dollars:,.0f}, more than ${for_usd:,.0f}: give a later --within or a larger --for"
        )
    return tried


def _fastest_within(costs: LayoutCosts, tried: list[Tried], for_usd: float | None, most: int) -> list[Tried]:
    assert for_usd is not None
    if not tried:
        raise NapkinError(f"no layout of up to {most:,} {costs.site.device_name} trains the recipe: {_smaller}")
    if tried[0].dollars is None:
        raise NapkinError(
            f"the price of {costs.site.device_name} is not known, so --for cannot be met: give --usd-per-hour"
        )
    within = [each for each in tried if each.dollars is not None and each.dollars <= for_usd]
    if not within:
        cheapest = min(tried, key=lambda each: each.dollars if each.dollars is not None else math.inf)
        raise NapkinError(
            f"${for_usd:,.0f} is not enough: the cheapest is {cheapest.n_devices:,} devices for "
            f"${cheapest.dollars:,.0f}, in {format_seconds(cheapest.seconds)}: give a larger --for, or fewer "
            "--training.steps"
        )
    fastest = min(within, key=lambda each: each.seconds)
    return [*(each for each in tried if each is not fastest), fastest]


def _too_late(costs: LayoutCosts, tried: list[Tried], within_seconds: float, most: int) -> str:
    wanted = f"{format_seconds(within_seconds)} is not enough time on up to {most:,} {costs.site.device_name}"
    if not tried:
        return f"{wanted}: no number of them could, whatever the layout; give a later --within or more devices"
    fastest = min(tried, key=lambda each: each.seconds)
    return (
        f"{wanted}: the fastest found are {fastest.n_devices:,} in {format_seconds(fastest.seconds)}: give a later "
        "--within, a larger --training.batch-size with fewer steps, or more devices"
    )


_smaller = "use a smaller --model.d-model or --model.context-length"
