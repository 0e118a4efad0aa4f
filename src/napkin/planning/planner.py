"""The planner: one function for this machine, for the devices of a datasheet, and for any number of them.

`resolve` sets the fields that a recipe leaves open, from its tokenizer and the devices that it is for; `plan_resolved`
counts and prices. `SharedPlans` plans several runs in one process: steps that are alike are counted and timed once.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from napkin.accounting.ledger import Ledger
from napkin.accounting.pricing import Price
from napkin.data.batches import Batches, repetition_warnings
from napkin.data.mixing import TokenMixture
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.planning.layouts.layout_plan import LayoutPlan, plan_layout
from napkin.planning.layouts.rank_plan import planned_layout, planned_ranks
from napkin.planning.step.kernel_choice import (
    choose_compile,
    choose_kernels,
    choose_triton,
    refuse_impossible_compile,
    with_compile_written_out,
    with_kernels_that_run,
)
from napkin.planning.step.machine import CatalogueMachine, Machine, Progress, machine_of
from napkin.planning.step.memory_savings import largest_micro_batch, refuse_far_too_much
from napkin.planning.step.run_plan import Plan
from napkin.recipe.data_config import paths_and_weights
from napkin.recipe.layout import refuse_impossible_layout
from napkin.recipe.mixture import open_mixture
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.runs.accounting_files import PlannedFile
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.train_step.step_ledger import count_step


def resolve(recipe: Recipe, machine: Machine) -> ResolvedRecipe:
    """The recipe with every default written out; with micro_batch_size "auto" its step is counted.

    Raises NapkinError where the batch does not divide among the devices, and where the devices do not support
    what the recipe asks for.
    """
    recipe = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, vocab_size=vocab_size_of(recipe)),
        optimizer=dataclasses.replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps),
    )
    precision = machine.precision(recipe.training.precision)
    recipe = dataclasses.replace(recipe, training=machine.training(recipe.training, precision))
    recipe = choose_triton(with_kernels_that_run(recipe, machine), precision, machine)
    resolved = ResolvedRecipe(choose_kernels(recipe, precision), precision, machine.target, machine.n_devices)
    _ = resolved.per_device
    refuse_impossible_layout(recipe, resolved.layout)
    if machine.measured:
        refuse_impossible_compile(resolved)
    if recipe.training.offload_optimizer and precision.device_type == "cpu":
        raise NapkinError(
            "training.offload_optimizer is True, but the run is on a CPU, whose optimizer state is in host memory "
            "anyway: leave it out"
        )
    if recipe.training.micro_batch_size == "auto":
        size = largest_micro_batch(resolved, machine.memory_bytes)
        resolved = resolved.with_training(micro_batch_size=size)
    return resolved


def with_vocab_size(recipe: Recipe, vocab_size: int) -> Recipe:
    """The recipe for a tokenizer of that size. Raises NapkinError where the recipe gives another one."""
    if recipe.model.vocab_size not in (0, vocab_size):
        raise NapkinError(
            f"model.vocab_size is {recipe.model.vocab_size}, the tokenizer has {vocab_size}: "
            "leave the field out or use that number"
        )
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=vocab_size))


def vocab_size_of(recipe: Recipe) -> int:
    """The recipe's model.vocab_size or, if it is 0, that of its tokenizer."""
    if recipe.model.vocab_size:
        return recipe.model.vocab_size
    if not Path(recipe.data.tokenizer).is_file():
        raise NapkinError(
            f"there is no tokenizer file '{recipe.data.tokenizer}', so the vocabulary is unknown: "
            "give its size with --model.vocab-size, or a tokenizer with --data.tokenizer"
        )
    return load_tokenizer(recipe.data.tokenizer).vocab_size


@runtime_checkable
class Planner(Protocol):
    """Plans the step of a resolved recipe, as `plan_resolved` does."""

    def __call__(self, resolved: ResolvedRecipe, machine: Machine, *, progress: Progress = ...) -> Plan: ...


def plan(
    recipe: Recipe, on: str | Machine | None = None, *, ranks: Ranks = ALONE, progress: Progress = lambda doing: None
) -> Plan:
    """Predict memory, FLOPs and seconds of a run before it starts, without allocating the model.

    Args:
        recipe: what to train; if it sets model.vocab_size, its tokenizer file is not needed.
        on: devices of the catalogue, as in "64xH100"; None is this machine, which is measured once.
        ranks: the processes that this machine is divided among.
        progress: called with a description of each stage.

    Raises NapkinError where the recipe does not suit the devices: a batch that does not divide among them, a number
    format that they lack, a step so far beyond their memory that counting it would take minutes. A plan that exceeds
    the memory by less is returned: see `Plan.fits`.
    """
    machine = machine_of(on, ranks=ranks, device=recipe.training.device)
    planned = plan_resolved(resolve(recipe, machine), machine, progress=progress)
    # A plan needs no text: files that do not exist yet are left out.
    try:
        files = {path: TokenFile.open(path) for path in paths_and_weights(recipe.data.train)[0]}
    except NapkinError:
        return planned
    mixture = open_mixture(planned.recipe, files.__getitem__)
    with contextlib.suppress(NapkinError):
        return with_text(planned, mixture)
    return planned


def with_text(planned: Plan, tokens: TokenMixture) -> Plan:
    """The plan with its epochs of the training files, and warnings where they are read too often.

    Raises NapkinError where a file is shorter than a window.
    """
    training = planned.recipe.training
    batches = Batches(
        tokens,
        context_length=planned.recipe.model.context_length,
        batch_size=training.batch_size,
        seed=training.data_seed,
    )
    epochs = tokens.epochs(planned.steps * planned.tokens_per_step)
    return dataclasses.replace(
        planned,
        epochs=epochs,
        mixture=_planned_files(batches, planned.steps),
        warnings=tuple(repetition_warnings(batches, planned.steps)),
    )


def _planned_files(batches: Batches, steps: int) -> tuple[PlannedFile, ...]:
    files = batches.tokens.files
    if len(files) == 1:
        return ()
    n_windows = [n for n, _ in batches.windows_of_files]
    return tuple(
        PlannedFile(str(file.path), file.n_tokens, epochs, share=epochs * n / (steps * batches.batch_size))
        for file, epochs, n in zip(files, batches.epochs_of_files(steps), n_windows, strict=True)
    )


def plan_resolved(resolved: ResolvedRecipe, machine: Machine, *, progress: Progress = lambda doing: None) -> Plan:
    """Count and price the step of a resolved recipe, for one device; on several ranks, for that of rank 0.

    In a pipeline, other ranks are counted too: all that have other stages on this machine, of a datasheet's devices the
    one that needs most.
    """
    machine.prepare(resolved.recipe.training)
    progress("counting the step")
    refuse_far_too_much(resolved, machine.device_name, machine.memory_bytes)
    layout = _layout_plan(resolved, machine, progress)
    ledgers = {rank: _count(resolved, rank, progress) for rank in _ranks_to_count(resolved, layout)}
    if machine.measured:
        progress("measuring this machine, once")
    ceilings = machine.ceilings(resolved.precision)
    site = machine.site(resolved.precision, ceilings)

    def price(parts: Sequence[Ledger]) -> list[Price]:
        return machine.price(resolved, parts, ceilings, progress)

    if layout is not None:
        planned = planned_layout(resolved, ledgers, price([ledgers[0]])[0], site, layout)
    elif machine.n_devices > 1:
        planned = planned_ranks(resolved, ledgers, price, site)
    else:
        planned = Plan(resolved, ledgers[0], price([ledgers[0]])[0], site)
    estimate = choose_compile(resolved, ledgers[0], ceilings, here=machine.measured)
    planned = dataclasses.replace(planned, compile_estimate=estimate)
    if not machine.measured:
        return planned
    recipe = with_compile_written_out(resolved.recipe, planned)
    return dataclasses.replace(planned, resolved=dataclasses.replace(resolved, recipe=recipe))


def _layout_plan(resolved: ResolvedRecipe, machine: Machine, progress: Progress) -> LayoutPlan | None:
    """The plan of several devices of a catalogue; None for others, and where it is not known what connects them."""
    if not isinstance(machine, CatalogueMachine) or machine.n_devices == 1:
        return None
    if machine.site(resolved.precision, machine.ceilings(resolved.precision)).interconnect is None:
        return None
    return plan_layout(resolved, machine, progress=progress)


def _ranks_to_count(resolved: ResolvedRecipe, layout: LayoutPlan | None) -> list[int]:
    pipeline = resolved.layout.pipeline
    stride = resolved.world_size // pipeline
    if layout is None:
        return [stride * place for place in range(pipeline)]
    return sorted({0, stride * layout.largest_rank})


def _count(resolved: ResolvedRecipe, rank: int, progress: Progress) -> Ledger:
    named = f"counting the step of rank {rank}" if rank else "counting the step"
    return count_step(resolved, rank, progress=lambda calls: progress(f"{named}: {calls:,} operator calls"))


# Runs of a sweep differ in seeds, learning rates and numbers of steps more often than in what a step computes.

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
        """The number of kinds of steps that were counted."""
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
    """The parts of a resolved recipe that decide on the operators of its step: equal keys, equal ledgers."""
    return tuple(
        (table, name, bool(value) if name in _ZERO_OR_NOT else value)
        for table, values in dataclasses.asdict(recipe).items()
        if table != "tracking"
        for name, value in values.items()
        if name not in _FREE.get(table, ())
    )
