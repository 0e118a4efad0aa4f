"""Profile the step of a recipe: planned as for training, with new weights, on random tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from napkin.distributed.ranks import ALONE, Ranks
from napkin.planning.machine import ThisMachine
from napkin.planning.micro_batch import refuse_what_does_not_fit
from napkin.planning.planner import plan_resolved
from napkin.planning.resolve import resolve
from napkin.planning.run_plan import Plan
from napkin.profiling.profiler import STEPS, assembled, measured_steps
from napkin.profiling.step_profile import StepProfile
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import TrainState, build_train_state


def profile_recipe(
    recipe: Recipe,
    *,
    steps: int = STEPS,
    ranks: Ranks = ALONE,
    progress: Callable[[str], None] = lambda doing: None,
    title: str = "a step",
) -> StepProfile:
    """Plan a recipe's step on this machine and profile it.

    The weights are new and the tokens random, which changes neither operators nor shapes; only a router of experts
    would divide other tokens otherwise. Nothing is read but the tokenizer's size and nothing is written.

    Of several ranks, each profiles its own step, and all have to call this; the result is this rank's, with a line for
    each rank. Raises NapkinError where the step does not fit into memory.
    """
    machine = ThisMachine(ranks, device=recipe.training.device)
    resolved, plan, compiled = _agreed(recipe, machine, ranks, progress)
    machine.prepare(resolved.recipe.training)
    train_state = build_train_state(resolved, ranks, compiled=compiled)
    device = torch.device(resolved.precision.device_type)
    step = _step_of(train_state, resolved)
    measured = measured_steps(step, train_state.model, device, steps=steps, progress=progress)
    ceilings = machine.ceilings(resolved.precision)
    if plan is None:
        found = assembled(measured, device, ceilings, title=title)
    else:
        found = assembled(measured, device, ceilings, plan.price, plan.ledger, title=title)
    return found if ranks.world_size == 1 else replace(found, ranks=tuple(ranks.all_gather(_told(found))))


def _agreed(
    recipe: Recipe, machine: ThisMachine, ranks: Ranks, progress: Callable[[str], None]
) -> tuple[ResolvedRecipe, Plan | None, bool]:
    """The resolved recipe, the plan, which rank 0 alone has, and whether blocks are compiled."""
    made: list[Plan] = []

    def make() -> tuple[int | str | None, bool]:
        plan = plan_resolved(resolve(recipe, machine), machine, progress=progress)
        refuse_what_does_not_fit(plan)
        made.append(plan)
        training = plan.resolved.recipe.training
        return training.micro_batch_size, training.compile == "on"

    micro_batch_size, compiled = ranks.broadcast_from_zero(make)
    if made:
        return made[0].resolved, made[0], compiled
    training = replace(recipe.training, micro_batch_size=micro_batch_size)
    return resolve(replace(recipe, training=training), machine), None, compiled


def _step_of(train_state: TrainState, resolved: ResolvedRecipe) -> Callable[[], Any]:
    recipe, device = resolved.per_device, resolved.precision.device_type
    generator = torch.Generator().manual_seed(0)
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator).to(device)
    batch = (tokens, tokens, torch.zeros_like(tokens)) if recipe.data.separate_documents else (tokens, tokens)
    # Always the first of the schedule: what is computed is the same in all of them.
    return lambda: train_state.step(0, *batch)


def _told(found: StepProfile) -> dict[str, float]:
    """A rank's seconds, for the others."""
    collectives = {"wait_tensor", *(row.operator for row in found.ledger.rows if row.collective is not None)}
    waiting = sum(row.figures.seconds for row in found.rows if row.operator in collectives)
    return {
        "seconds": found.seconds,
        "operators": found.total.seconds - waiting,
        "collectives": waiting,
        "outside": found.seconds - found.total.seconds,
        "overhead": found.overhead,
    }
