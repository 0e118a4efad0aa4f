"""Searches over plans: the fewest devices of a kind that finish a run in time, the most that its budget allows, and the
largest model of a family whose training step fits on given devices.
"""

import functools
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

    `costs` are of the recipe on any number of the devices, of which `most` are tried; `trains` is as `search_layouts`
    takes it. Raises NapkinError where no number of devices is enough, with the nearest.
    """
    tried: list[Tried] = []
    training, device = costs.resolved.recipe.training, costs.site.device_name
    flops = training.steps * costs.model_flops(training.batch_size)
    for n_devices in device_counts(costs.interconnect.devices_per_node, most):
        least_seconds = flops / (n_devices * costs.site.matmul_peak * _BEST_MFU)
        if within_seconds is not None and least_seconds > within_seconds:
            continue
        machine = CatalogueMachine(
            costs.machine.device, n_devices, node=costs.machine.node, efficiency=costs.machine.efficiency
        )
        progress(f"searching layouts of {n_devices:,} devices")
        try:
            plan = search_layouts(costs.on(machine), best=1, trains=trains).plans[0]
        except NapkinError:
            continue
        last = Tried(n_devices, machine, plan, training.steps * plan.seconds, plan.dollars)
        tried.append(last)
        too_dear = for_usd is not None and last.dollars is not None and last.dollars > for_usd
        if within_seconds is not None and last.seconds <= within_seconds:
            if too_dear:
                raise NapkinError(
                    f"the first that is in time, {n_devices:,} devices, takes {format_seconds(last.seconds)} and costs "
                    f"${last.dollars:,.0f}, more than ${for_usd:,.0f}: give a later --within or a larger --for"
                )
            return tried
        if within_seconds is None and for_usd is not None and last.dollars is not None and last.dollars > 1.5 * for_usd:
            break
    if within_seconds is not None:
        wanted = f"{format_seconds(within_seconds)} is not enough time on up to {most:,} {device}"
        if not tried:
            raise NapkinError(
                f"{wanted}: no number of them could, whatever the layout; give a later --within or more devices"
            )
        fastest = min(tried, key=lambda each: each.seconds)
        raise NapkinError(
            f"{wanted}: the fastest found are {fastest.n_devices:,} in {format_seconds(fastest.seconds)}: give a later "
            "--within, a larger --training.batch-size with fewer steps, or more devices"
        )
    assert for_usd is not None
    if not tried:
        raise NapkinError(
            f"no layout of up to {most:,} {device} trains the recipe: use a smaller --model.d-model or "
            "--model.context-length"
        )
    priced = {each.n_devices: each.dollars for each in tried if each.dollars is not None}
    if not priced:
        raise NapkinError(f"the price of {device} is not known, so --for cannot be met: give --usd-per-hour")
    within = [each for each in tried if priced[each.n_devices] <= for_usd]
    if not within:
        cheapest = min(tried, key=lambda each: priced[each.n_devices])
        raise NapkinError(
            f"${for_usd:,.0f} is not enough: the cheapest is {cheapest.n_devices:,} devices for "
            f"${cheapest.dollars:,.0f}, in {format_seconds(cheapest.seconds)}: give a larger --for, or fewer "
            "--training.steps"
        )
    fastest = min(within, key=lambda each: each.seconds)
    return [*(each for each in tried if each is not fastest), fastest]


def device_counts(per_node: int, most: int) -> Iterator[int]:
    """Parts of a node that are powers of two, then nodes: powers of two, and 1.5 times those."""
    counts = {2**power for power in range(per_node.bit_length()) if 2**power < per_node}
    nodes = {factor * 2**power for power in range(32) for factor in (1, 3)}
    counts |= {per_node * number for number in nodes if per_node * number <= most}
    return iter(sorted(number for number in counts if number <= most))


HEAD_DIM = 128
WIDTH_PER_LAYER = 128
"""d_model over n_layers: 128 in GPT-3 (Brown et al. 2020, table 2.1), and about that in Llama."""
MOST_LAYERS = 512
DEEPER = 8
"""Layers of the deepest small member that is counted."""
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
    def counted(n_layers: int, width: int) -> int:
        return family.count(machine, width, n_layers).peak_bytes

    @functools.cache
    def bytes_per_layer(width: int) -> float:
        progress(f"counting models of width {width}")
        return (counted(6, width) - counted(2, width)) / 4

    def peak_bytes(n_layers: int, width: int) -> int:
        """The estimate of a line through two small models; with one layer the peak is often at the output head."""
        each = bytes_per_layer(width)
        return counted(1, width) if n_layers == 1 else round(counted(2, width) + (n_layers - 2) * each)

    # The model that fills the memory without activations has 12 · layers · width² parameters. Bytes grow with about the
    # third power of the layers, because the width grows with them: few evaluations suffice.
    each = bytes_per_parameter(family.optimizer)
    parameters = largest_model_rule(machine.n_devices * usable, bytes_per_parameter=each)
    guess = round((parameters / (12 * WIDTH_PER_LAYER**2)) ** (1 / 3))
    n_layers, exceeds = 0, MOST_LAYERS + 1
    while exceeds - n_layers > 1:
        guess = min(max(guess, n_layers + 1), exceeds - 1)
        peak = peak_bytes(guess, WIDTH_PER_LAYER * guess)
        if peak <= usable:
            n_layers = guess
        else:
            exceeds = guess
        guess = round(guess * (usable / peak) ** (1 / 3))
    if not n_layers:
        raise NapkinError(
            f"not even one layer of width {WIDTH_PER_LAYER} fits, "
            f"{memory_of(machine.device_name, machine.memory_bytes)}: use a smaller "
            "--batch-size, --context-length or --vocab-size"
        )
    width = WIDTH_PER_LAYER * n_layers
    while peak_bytes(n_layers + 1, width) <= usable:
        n_layers += 1
    each = bytes_per_layer(width)
    if n_layers > DEEPER:
        # Some of the first layers are not alive at the peak: a line through deeper models is exact to a layer.
        each = (counted(DEEPER, width) - counted(6, width)) / (DEEPER - 6)
        n_layers = DEEPER + int((usable - counted(DEEPER, width)) / each)
    # The largest model that fits by count is found from there, in steps of as many layers as the difference in bytes
    # allows.
    largest, exceeds = None, MOST_LAYERS + 1
    while n_layers < exceeds:
        progress(f"counting {n_layers} layers of width {width}")
        plan = plan_resolved(family.resolved(machine, width, n_layers), machine)
        layers_away = max(1, int(abs(usable - plan.ledger.peak_bytes) / each))
        if plan.fits:
            largest = plan
            if plan.ledger.peak_bytes + LEAST_GROWTH * each > usable:
                break
            n_layers = max(n_layers + 1, min(n_layers + layers_away, exceeds - 1))
        else:
            exceeds = n_layers
            n_layers = max(n_layers - layers_away, 1 if largest is None else largest.recipe.model.n_layers + 1)
    assert largest is not None
    return largest


def gathered_bytes_of(plan: Plan) -> int:
    """Bytes of unsharded parameters that a device holds at a time."""
    if plan.resolved.strategy != "fsdp":
        return 0
    return max(moment.weight_copy_bytes for moment in plan.ledger.timeline)
