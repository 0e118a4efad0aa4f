"""What a sweep takes, before it starts: seconds, dollars and bytes of all runs, and how many of them run at once."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from napkin.checkpoint.disk_space import kept_checkpoints
from napkin.distributed.ranks import ALONE
from napkin.errors import NapkinError
from napkin.hardware.host import detect_host
from napkin.planning.checkpoint_plan import whole_checkpoint_bytes
from napkin.planning.micro_batch import refuse_what_does_not_fit
from napkin.planning.run_plan import Plan
from napkin.planning.shared_plans import SharedPlans
from napkin.recipe.precision import choose_device
from napkin.recipe.recipe import Recipe
from napkin.scaling.trials import Trial
from napkin.training.preparation import prepare
from napkin.units import format_bytes

SECONDS_PER_RUN = 1.0
"""Of a run in a sweep beside its steps: its files are opened, a step is metered, a checkpoint and a report are written.
Measured: see docs/scaling.md."""
FORWARD_SHARE = 1 / 3
"""Of a step's FLOPs: the backward pass has twice as many as the forward pass."""


@dataclass(frozen=True)
class SweepPlan:
    """The plans of the runs of a sweep."""

    plans: dict[str, Plan]
    """By the name of the run."""
    at_once: int
    """Runs that train side by side."""
    n_counted: int
    """How many different steps were counted and timed."""

    @property
    def seconds(self) -> float:
        """Of all runs, side by side, with evaluations and what a run takes beside its steps."""
        return sum(map(run_seconds, self.plans.values())) / self.at_once

    @property
    def dollars(self) -> float | None:
        """Of these seconds; None where the price is not known."""
        price = next((plan.site.usd_per_hour for plan in self.plans.values()), None)
        return None if price is None else self.seconds / 3600 * price

    @property
    def flops(self) -> int:
        """Counted FLOPs of all steps of all runs."""
        return sum(plan.steps * plan.ledger.flops for plan in self.plans.values())

    @property
    def peak_bytes(self) -> int:
        """Tensors of the largest runs that may train side by side."""
        return sum(sorted((plan.peak_bytes for plan in self.plans.values()), reverse=True)[: self.at_once])

    @property
    def disk_bytes(self) -> int:
        """Checkpoints that all runs keep."""
        return sum(
            whole_checkpoint_bytes(plan) * min(kept_checkpoints(plan.recipe.training), _written(plan))
            for plan in self.plans.values()
        )


def run_seconds(plan: Plan) -> float:
    """Seconds of a run: steps, evaluations by the rule that a forward pass is a third of a step, and the rest."""
    training, recipe = plan.recipe.training, plan.recipe
    n_evaluations = 0 if recipe.data.validation is None else -(-training.steps // training.evaluate_every)
    per_evaluation = FORWARD_SHARE * plan.seconds_per_step * training.evaluation_tokens / plan.tokens_per_step
    return plan.seconds + n_evaluations * per_evaluation + SECONDS_PER_RUN


def plan_sweep(
    trials: Sequence[Trial],
    planner: SharedPlans,
    *,
    at_once: int | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> SweepPlan:
    """Open the files of every run and plan it on this machine; `planner` counts steps that are alike once.

    `at_once` is how many runs train side by side; None is as many as have cores and memory if the recipe says how many
    threads each has, else one. Raises NapkinError where a run or that many do not fit.
    """
    plans: dict[str, Plan] = {}
    for number, trial in enumerate(trials, start=1):
        progress(f"planning run {number} of {len(trials)}")
        try:
            plan = prepare(trial.recipe, planner=planner).plan
            assert plan is not None
            refuse_what_does_not_fit(plan)
        except NapkinError as error:
            raise NapkinError(f"the run {trial.name}: {error}") from None
        plans[trial.name] = plan
    return SweepPlan(plans, _side_by_side(list(plans.values()), at_once), planner.n_counted)


def with_threads(recipe: Recipe, at_once: int | None) -> Recipe:
    """The recipe with the threads of one of `at_once` runs, where it leaves them open.

    Raises NapkinError where there are fewer cores than runs, and for runs side by side on one GPU.
    """
    if at_once is None or at_once == 1:
        return recipe
    if at_once < 1:
        raise NapkinError(f"--at-once is {at_once}: use 1 or more")
    if choose_device(recipe.training.device) == "cuda":
        raise NapkinError(f"--at-once is {at_once}, but runs on a GPU train one after the other: leave it out")
    cores = detect_host().cores
    threads = recipe.training.threads or cores // at_once
    if not threads or threads * at_once > cores:
        each = f" of {threads} threads" if threads > 1 else ""
        raise NapkinError(f"--at-once is {at_once}, but {at_once} runs{each} do not fit on {cores} cores: use fewer")
    training = dataclasses.replace(recipe.training, threads=threads)
    return dataclasses.replace(recipe, training=training)


def refuse_too_small_disk_for_all(plan: SweepPlan, folder: Path) -> None:
    """Raise NapkinError where the disk has no space for the checkpoints of all runs."""
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < plan.disk_bytes:
        raise NapkinError(
            f"the checkpoints of {len(plan.plans)} runs take {format_bytes(plan.disk_bytes)}, the disk of '{folder}' "
            f"has {format_bytes(free)} free: choose a --runs on another disk, or --training.keep-checkpoints 1 with "
            "--training.keep-best false"
        )


def _written(plan: Plan) -> int:
    training = plan.recipe.training
    return -(-training.steps // training.checkpoint_every) + training.keep_best


def _side_by_side(plans: list[Plan], at_once: int | None) -> int:
    if not plans:
        return 1
    peaks = sorted((plan.peak_bytes for plan in plans), reverse=True)
    threads = [plan.recipe.training.threads or 1 for plan in plans]
    site = plans[0].site
    # A process of its own has its own copy of the libraries.
    libraries = psutil.Process().memory_info().rss
    by_memory = next(
        (n for n in range(len(plans), 1, -1) if sum(peaks[:n]) + n * libraries <= site.memory_bytes + libraries), 1
    )
    if at_once is None:
        chosen = all(plan.resolved.precision.device_type == "cpu" for plan in plans)
        at_once = detect_host().cores // max(threads) if chosen and ALONE.world_size == 1 else 1
        return max(1, min(at_once, by_memory, len(plans)))
    at_once = min(at_once, len(plans))
    if at_once > by_memory:
        needed = sum(peaks[:at_once]) + at_once * libraries
        raise NapkinError(
            f"--at-once is {at_once}, but {at_once} runs side by side take {format_bytes(needed)}, this machine has "
            f"{format_bytes(site.memory_bytes)} free: use --at-once {by_memory}"
        )
    return at_once
