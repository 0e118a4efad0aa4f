"""The planner: one function for this machine, for the devices of a datasheet, and for any number of them."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from napkin.accounting.ledger import Ledger
from napkin.accounting.pricing import Price
from napkin.data.batches import Batches
from napkin.data.mixing import TokenMixture
from napkin.data.repetition import repetition_warnings
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.planning.compile_choice import choose_compile, with_compile_written_out
from napkin.planning.layout_plan import LayoutPlan, plan_layout
from napkin.planning.machine import CatalogueMachine, Machine, Progress, machine_of
from napkin.planning.micro_batch import refuse_far_too_much
from napkin.planning.rank_plan import planned_layout, planned_ranks
from napkin.planning.resolve import resolve
from napkin.planning.run_plan import Plan
from napkin.recipe.mixture import open_mixture
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.train_files import paths_and_weights
from napkin.runs.plan_file import PlannedFile
from napkin.train_step.step_ledger import count_step


@runtime_checkable
class Planner(Protocol):
    """Plans the step of a resolved recipe, as `plan_resolved` does."""

    def __call__(self, resolved: ResolvedRecipe, machine: Machine, *, progress: Progress = ...) -> Plan:
        """The plan on that machine."""
        ...


def plan(
    recipe: Recipe,
    on: str | Machine | None = None,
    *,
    ranks: Ranks = ALONE,
    progress: Progress = lambda doing: None,
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
    """Of several devices of a catalogue; None for others, and where it is not known what connects them."""
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
