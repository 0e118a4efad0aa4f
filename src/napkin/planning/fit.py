"""Searches over plans: the fewest devices of a kind that finish a run in time, the most that its budget allows, and the
largest model of a family whose training step fits on given devices.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from napkin.accounting.ledger import Ledger
from napkin.accounting.rules import bytes_per_parameter, largest_model_rule
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.planning.layouts.costs import LayoutCosts
from napkin.planning.layouts.layout_plan import LayoutPlan
from napkin.planning.layouts.search import search_layouts
from napkin.planning.planner import plan_resolved, resolve
from napkin.planning.step.machine import CatalogueMachine, Machine
from napkin.planning.step.run_plan import Plan
from napkin.planning.step.site import memory_of, step_memory
from napkin.recipe.precision import PrecisionName
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step_ledger import count_step
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
    """Seconds of all steps."""
    dollars: float | None

    def as_values(self) -> dict[str, Any]:
        """The layout for programs, with its number of devices."""
        return {
            "n_devices": self.n_devices,
            "seconds": self.seconds,
            "dollars": self.dollars,
            **self.plan.as_values(),
        }


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


HEAD_DIM = 128
WIDTH_PER_LAYER = 128
"""d_model over n_layers: 128 in GPT-3 (Brown et al. 2020, table 2.1), and about that in Llama."""
MOST_LAYERS = 512
LEAST_GROWTH = 0.97
"""Bytes that any layer adds to the peak, as a fraction of what layers add on average: the optimizer's buckets, whose
temporaries are part of the peak, do not grow layer by layer."""


@dataclass(frozen=True)
class Family:
    """Models of one shape, with as many heads of width 128 as layers, and their training settings; sharded by fsdp."""

    vocab_size: int
    context_length: int
    batch_size: int
    """Sequences per device and step."""
    precision: Literal["auto"] | PrecisionName = "auto"
    optimizer: str = "adamw"

    def resolved(self, machine: Machine, d_model: int, n_layers: int) -> ResolvedRecipe:
        """The resolved recipe of the member of that size, for all devices of a machine."""
        n_heads = d_model // HEAD_DIM
        model = ModelConfig(self.vocab_size, self.context_length, d_model=d_model, n_layers=n_layers, n_heads=n_heads)
        training = TrainingConfig(
            batch_size=machine.n_devices * self.batch_size,
            micro_batch_size=self.batch_size,
            parallelism="fsdp",
            precision=self.precision,
        )
        return resolve(Recipe(model=model, optimizer=OptimizerConfig(name=self.optimizer), training=training), machine)

    def count(self, machine: Machine, d_model: int, n_layers: int) -> Ledger:
        """The ledger of that member's step on one device."""
        return count_step(self.resolved(machine, d_model, n_layers))


def largest_model(family: Family, machine: Machine, *, progress: Callable[[str], None] = lambda doing: None) -> Plan:
    """The plan of the largest member of `family` that trains on the machine, sharded over all of its devices.

    Widths are multiples of 128, with one layer for each 128, and then as many more layers as fit. For each width tried,
    two small members are counted; the returned model is counted completely, and fits by its own plan.

    Raises NapkinError where not even the smallest member fits.
    """
    usable = step_memory(machine.memory_bytes)

    @functools.cache
    def width_of(n_layers: int) -> _Width:
        progress(f"counting models of width {WIDTH_PER_LAYER * n_layers}")
        return _Width(family, machine, WIDTH_PER_LAYER * n_layers)

    n_layers = _largest(lambda n: width_of(n).peak_bytes(n), usable, _guess(family, machine.n_devices * usable))
    if not n_layers:
        raise NapkinError(
            f"not even one layer of width {WIDTH_PER_LAYER} fits, "
            f"{memory_of(machine.device_name, machine.memory_bytes)}: use a smaller "
            "--batch-size, --context-length or --vocab-size"
        )
    width = width_of(n_layers)
    while width.peak_bytes(n_layers + 1) <= usable:
        n_layers += 1
    # The estimate is off by a layer or two: what fits by count is found from there, upwards or downwards.
    found, exceeds = None, MOST_LAYERS + 1
    while n_layers < exceeds:
        progress(f"counting {n_layers} layers of width {width.d_model}")
        plan = plan_resolved(family.resolved(machine, width.d_model, n_layers), machine)
        if plan.fits:
            found, n_layers = plan, n_layers + 1
            if plan.ledger.peak_bytes + LEAST_GROWTH * width.bytes_per_layer > usable:
                break
        else:
            exceeds = n_layers
            n_layers -= (
                max(1, round((plan.ledger.peak_bytes - usable) // width.bytes_per_layer)) if found is None else 0
            )
    assert found is not None
    return found


def gathered_bytes_of(plan: Plan) -> int:
    """Bytes of parameters that a device holds unsharded at a time."""
    if plan.resolved.strategy != "fsdp":
        return 0
    return max(moment.weight_copy_bytes for moment in plan.ledger.timeline)


def _guess(family: Family, total_bytes: int) -> int:
    """Number of layers of the model that fills `total_bytes` without activations: 12 · layers · width² parameters."""
    parameters = largest_model_rule(total_bytes, bytes_per_parameter=bytes_per_parameter(family.optimizer))
    return round((parameters / (12 * WIDTH_PER_LAYER**2)) ** (1 / 3))


def _largest(peak_bytes: Callable[[int], int], usable: int, guess: int) -> int:
    """The largest number of layers whose peak fits, at most MOST_LAYERS; 0 for none.

    Bytes grow with about the third power of the layers, because the width grows with them: few evaluations suffice.
    """
    fits, exceeds = 0, MOST_LAYERS + 1
    while exceeds - fits > 1:
        guess = min(max(guess, fits + 1), exceeds - 1)
        peak = peak_bytes(guess)
        if peak <= usable:
            fits = guess
        else:
            exceeds = guess
        guess = round(guess * (usable / peak) ** (1 / 3))
    return fits


class _Width:
    """All models of a width, estimated: two small ones are counted, and a line is drawn through them.

    With one layer the peak is often at the output head.
    """

    def __init__(self, family: Family, machine: Machine, d_model: int) -> None:
        self.d_model = d_model
        self._count = functools.partial(family.count, machine, d_model)
        self._two = self._count(2).peak_bytes
        self.bytes_per_layer = (self._count(6).peak_bytes - self._two) / 4

    def peak_bytes(self, n_layers: int) -> int:
        """Peak bytes of one device's step."""
        if n_layers == 1:
            return self._count(1).peak_bytes
        return round(self._two + (n_layers - 2) * self.bytes_per_layer)
