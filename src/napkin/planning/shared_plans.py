"""Plans of several runs in one process: steps that are alike are counted and timed once.

Runs of a sweep differ in seeds, learning rates and numbers of steps more often than in what a step computes.
"""

import dataclasses
from typing import Any

from napkin.planning.compile_choice import choose_compile, with_compile_written_out
from napkin.planning.machine import Machine, Progress
from napkin.planning.planner import plan_resolved
from napkin.planning.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe

_FREE = {
    "data": {"train", "validation", "tokenizer", "verify", "windows", "prefetch"},
    "model": {"init_std"},
    "optimizer": {"learning_rate", "schedule", "warmup_steps", "decay_steps", "final_fraction", "clip_norm"},
    "training": {
        "steps",
        "init_seed",
        "data_seed",
        "dropout_seed",
        "rounding_seed",
        "log_every",
        "checkpoint_every",
        "keep_checkpoints",
        "evaluate_every",
        "evaluation_tokens",
        "rank_timeout",
        "keep_best",
        "checkpoint_writing",
        "on_non_finite",
        "most_skipped",
        "compile",
    },
}
"""Fields whose value changes nothing of a step's operators and their shapes. Compilation is decided for each run."""
_ZERO_OR_NOT = {"momentum", "beta1", "beta2", "weight_decay", "dropout"}
"""Fields of which only counts whether they are 0: then an operator is left out."""


class SharedPlans:
    """A `Planner` that counts and times each kind of step once."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    @property
    def n_counted(self) -> int:
        """How many kinds of steps were counted."""
        return len(self._plans)

    def __call__(self, resolved: ResolvedRecipe, machine: Machine, *, progress: Progress = lambda doing: None) -> Plan:
        """The plan of a run on that machine: `plan_resolved`, or an earlier plan of the same step."""
        key = (machine.device_name, machine.n_devices, step_key(resolved.recipe))
        if key not in self._plans:
            self._plans[key] = plan_resolved(resolved, machine, progress=progress)
            return self._plans[key]
        planned = dataclasses.replace(self._plans[key], resolved=resolved)
        ceilings = machine.ceilings(resolved.precision)
        estimate = choose_compile(resolved, planned.ledger, ceilings, here=machine.measured)
        planned = dataclasses.replace(planned, compile_estimate=estimate)
        if not machine.measured:
            return planned
        recipe = with_compile_written_out(resolved.recipe, planned)
        return dataclasses.replace(planned, resolved=dataclasses.replace(resolved, recipe=recipe))


def step_key(recipe: Recipe) -> tuple[Any, ...]:
    """What decides on the operators of a step of a resolved recipe: equal keys, equal ledgers."""
    return tuple(
        (table, name, bool(value) if name in _ZERO_OR_NOT else value)
        for table, values in dataclasses.asdict(recipe).items()
        if table != "tracking"
        for name, value in values.items()
        if name not in _FREE.get(table, ())
    )
