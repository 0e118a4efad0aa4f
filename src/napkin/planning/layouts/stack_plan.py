"""Plans of a recipe as another stack trains it, and the calibration of a stack from measured runs.

Three runs of one's own say how much slower one's cluster computes and sends than the plan has it. Two factors are
found, of computing c and of sending s, that make

    sum over runs of (log planned(c, s) / measured)² / 0.06² + log(c)² / 0.15² + log(s)² / 0.25²

least: runs that hardly send leave s where it was. How far off the next run may be is judged by leaving out each run in
turn.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from napkin.errors import NapkinError
from napkin.hardware.cluster import find_cluster
from napkin.hardware.target import CudaTarget
from napkin.planning.layouts.costs import LayoutCosts, choice_of
from napkin.planning.layouts.layout_plan import LayoutPlan, plan_layout
from napkin.planning.layouts.stack import NAPKIN, Stack
from napkin.planning.step.machine import CatalogueMachine
from napkin.recipe.layout import layout_of_recipe
from napkin.recipe.training_config import ParallelismConfig

if TYPE_CHECKING:
    import numpy as np

    from napkin.recipe.recipe import Recipe
    from napkin.recipe.resolved import ResolvedRecipe

RUN_NOISE = 0.06
"""Relative error of a plan whose two factors are right: the median of published runs is about that."""
COMPUTING_NOISE = 0.15
SENDING_NOISE = 0.25
"""Expected deviation of the two factors from 1: the spread of published runs of other stacks."""
_NINE_IN_TEN = 1.645
_PRIOR_RUNS = 2
"""Runs that the stated interval of a plan counts for, beside those that were measured."""
_ROUNDS = 8
_STEP = 1e-3

Progress = Callable[[str], None]


def stack_machine(on: str, stack: Stack) -> CatalogueMachine:
    """The devices, with the attention that the stack has there. Raises NapkinError for an unknown name."""
    cluster = find_cluster(on)
    machine = CatalogueMachine(cluster.device, cluster.n_devices, node=cluster.node)
    capability = cluster.device.compute_capability
    if stack.cudnn_attention is False and capability:
        machine.target = CudaTarget(capability, cudnn_attention=False)
    return machine


def resolve_for_stack(recipe: "Recipe", machine: CatalogueMachine) -> "ResolvedRecipe":
    """The recipe with every default written out, whether or not napkin trains its layout.

    Raises NapkinError where a micro-batch, which others choose, is left to napkin's own count.
    """
    from napkin.planning.planner import resolve

    layout = layout_of_recipe(recipe, machine.n_devices)
    size = recipe.training.micro_batch_size
    if size == "auto":
        raise NapkinError(
            "training.micro_batch_size is 'auto', which is the largest that napkin's own step fits with: give the "
            "number of the stack that is planned, as in --training.micro-batch-size 1"
        )
    rows = recipe.training.batch_size // layout.batch_parts
    size = size or max(1, rows)
    # A layout that napkin does not train can still be planned: it is resolved as on one device.
    training = dataclasses.replace(recipe.training, batch_size=size, micro_batch_size=size, parallelism="ddp")
    alone = dataclasses.replace(recipe, parallelism=ParallelismConfig(), training=training)
    one = CatalogueMachine(machine.device, 1)
    one.target = machine.target
    resolved = resolve(alone, one)
    training = dataclasses.replace(
        resolved.recipe.training, batch_size=recipe.training.batch_size, parallelism=recipe.training.parallelism
    )
    whole = dataclasses.replace(resolved.recipe, parallelism=recipe.parallelism, training=training)
    return dataclasses.replace(resolved, recipe=whole, world_size=machine.n_devices)


def stack_costs(
    recipe: "Recipe",
    on: str,
    stack: Stack,
    *,
    usd_per_hour: float | None = None,
    progress: Progress = lambda doing: None,
) -> LayoutCosts:
    """The priced parts of a recipe as a stack computes them, for its own layout."""
    machine = stack_machine(on, stack)
    resolved = resolve_for_stack(recipe, machine)
    tensors = (resolved.layout.tensor,)
    return LayoutCosts(resolved, machine, tensors, usd_per_hour=usd_per_hour, stack=stack, progress=progress)


def plan_stack(
    recipe: "Recipe",
    on: str,
    stack: Stack = NAPKIN,
    *,
    usd_per_hour: float | None = None,
    progress: Progress = lambda doing: None,
) -> LayoutPlan:
    """Plan the step of a recipe on a catalogue's devices, as a stack trains it.

    Raises NapkinError as `plan_layout` and `resolve_for_stack` do.
    """
    costs = stack_costs(recipe, on, stack, usd_per_hour=usd_per_hour, progress=progress)
    return _planned(costs)


def _planned(costs: LayoutCosts) -> LayoutPlan:
    return plan_layout(costs.resolved, costs.machine, choice_of(costs.resolved), costs=costs)


@dataclass(frozen=True)
class MeasuredRun:
    """A run of one's own: its recipe, its devices, and the seconds of a step."""

    recipe: "Recipe"
    on: str
    seconds: float
    name: str = ""


@dataclass(frozen=True)
class StackCalibration:
    """A stack with the factors of one's own cluster, and what they are worth."""

    stack: Stack
    before: tuple[float, ...]
    """Relative errors of the plans without the factors, by run."""
    left_out: tuple[float, ...]
    """Relative errors with factors that were found without that run: what the next run may expect."""

    @property
    def median_before(self) -> float:
        return statistics.median(map(abs, self.before))

    @property
    def median_left_out(self) -> float:
        return statistics.median(map(abs, self.left_out))

    def changes(self, like: str) -> dict[str, Any]:
        """The stack as a file has it: the stack that it is like, and what differs."""
        stack = self.stack
        factor = stack.factor or 1.0
        figures = {"computing": stack.computing, "sending": stack.sending, "factor": factor, "experts_factor": factor}
        return {"like": like, **{name: float(f"{value:.4g}") for name, value in figures.items()}}


def calibrate_stack(
    runs: Sequence[MeasuredRun], stack: Stack = NAPKIN, *, progress: Progress = lambda doing: None
) -> StackCalibration:
    """Find the factors of computing and sending from measured runs of a stack on one kind of device.

    Raises NapkinError for fewer than two runs, and where a run cannot be planned.
    """
    if len(runs) < 2:
        raise NapkinError(f"{len(runs)} measured run says nothing of the next one: give two or more, best three")
    counted = [stack_costs(run.recipe, run.on, stack, progress=progress) for run in runs]

    def logs(number: int, factors: Sequence[float]) -> float:
        changed = dataclasses.replace(stack, computing=math.exp(factors[0]), sending=math.exp(factors[1]))
        costs = counted[number].priced_on(counted[number].machine, changed)
        return math.log(_planned(costs).seconds / runs[number].seconds)

    every = range(len(runs))
    start = (math.log(stack.computing), math.log(stack.sending))
    before = [logs(number, start) for number in every]
    left_out = [logs(out, _fitted(logs, [number for number in every if number != out], start)) for out in every]
    factors = _fitted(logs, every, start)
    stated = math.log(_planned(counted[0]).factor) / _NINE_IN_TEN
    variance = (sum(error**2 for error in left_out) + _PRIOR_RUNS * stated**2) / (len(runs) + _PRIOR_RUNS)
    calibrated = dataclasses.replace(
        stack,
        computing=math.exp(factors[0]),
        sending=math.exp(factors[1]),
        factor=math.exp(_NINE_IN_TEN * math.sqrt(variance)),
    )
    return StackCalibration(calibrated, tuple(map(math.expm1, before)), tuple(map(math.expm1, left_out)))


def _fitted(
    logs: Callable[[int, Sequence[float]], float], runs: Sequence[int], start: Sequence[float]
) -> tuple[float, float]:
    """Logarithms of the two factors, by Gauss-Newton steps from the stack's own."""
    import numpy as np

    factors, widths = np.array(start), np.array([COMPUTING_NOISE, SENDING_NOISE])

    def residuals(at: "np.ndarray") -> "np.ndarray":
        of_runs = [logs(number, at.tolist()) / RUN_NOISE for number in runs]
        return np.array([*of_runs, *((at - start) / widths)])

    for _ in range(_ROUNDS):
        now = residuals(factors)
        slopes = np.stack([(residuals(factors + _STEP * axis) - now) / _STEP for axis in np.eye(2)], axis=1)
        step = np.linalg.lstsq(slopes, -now, rcond=None)[0]
        factors = factors + np.clip(step, -0.7, 0.7)
        if abs(step).max() < _STEP:
            break
    return float(factors[0]), float(factors[1])
