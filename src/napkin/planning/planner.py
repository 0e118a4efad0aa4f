"""The planner: one function for this machine, for the devices of a datasheet, and for any number of them."""

import contextlib
import dataclasses

from napkin.accounting.communication import Communication
from napkin.accounting.pipeline_schedules import pipeline_schedule
from napkin.accounting.pipeline_simulation import StageSeconds, simulate_pipeline
from napkin.data.batches import Batches
from napkin.data.mixing import TokenMixture
from napkin.data.repetition import repetition_warnings
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.planning.compile_choice import choose_compile, with_compile_written_out
from napkin.planning.machine import Machine, Progress, machine_of
from napkin.planning.micro_batch import refuse_far_too_much
from napkin.planning.resolve import resolve
from napkin.planning.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.train_files import paths_and_weights
from napkin.train_step.step_ledger import count_step


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
    paths, weights = paths_and_weights(recipe.data.train)
    # A plan needs no text: files that do not exist yet are left out.
    with contextlib.suppress(NapkinError):
        return with_text(planned, TokenMixture([TokenFile.open(path) for path in paths], weights))
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
    return dataclasses.replace(planned, epochs=epochs, warnings=tuple(repetition_warnings(batches, planned.steps)))


def plan_resolved(resolved: ResolvedRecipe, machine: Machine, *, progress: Progress = lambda doing: None) -> Plan:
    """Count and price the step of a resolved recipe, for one device; on several ranks, for that of rank 0."""
    machine.prepare(resolved.recipe.training)
    progress("counting the step")
    refuse_far_too_much(resolved, machine.device_name, machine.memory_bytes)
    ledger = count_step(resolved, progress=lambda calls: progress(f"counting the step: {calls:,} operator calls"))
    if machine.measured:
        progress("measuring this machine, once")
    ceilings = machine.ceilings(resolved.precision)
    priced = machine.price(resolved, ledger, ceilings, progress)
    site = machine.site(resolved.precision, ceilings)
    planned = Plan(resolved=resolved, ledger=ledger, price=priced, site=site)
    if site.n_devices > 1:
        planned = _with_bubble(_with_communication(planned))
    estimate = choose_compile(resolved, ledger, ceilings, here=machine.measured)
    planned = dataclasses.replace(planned, compile_estimate=estimate)
    if not machine.measured:
        return planned
    recipe = with_compile_written_out(resolved.recipe, planned)
    return dataclasses.replace(planned, resolved=dataclasses.replace(resolved, recipe=recipe))


def _with_communication(planned: Plan) -> Plan:
    """The plan with the communication of its devices, and its seconds if it is known what connects them."""
    communication = Communication.of(planned.ledger)
    interconnect = planned.site.interconnect
    if interconnect is None:
        return dataclasses.replace(planned, communication=communication)
    by_phase = {phase: spent.seconds for phase, spent in planned.price.by_phase.items()}
    return dataclasses.replace(
        planned,
        communication=communication,
        communication_seconds=communication.seconds(interconnect),
        exposed_seconds=communication.exposed_seconds(
            interconnect,
            forward_seconds=by_phase.get("forward", 0.0),
            backward_seconds=by_phase.get("backward", 0.0) + by_phase.get("recompute", 0.0),
        ),
    )


def _with_bubble(planned: Plan) -> Plan:
    """The plan with the seconds in which rank 0 of a pipeline waits for other stages, if each takes as long as its own.

    `plan_layout` knows each stage; here one rank alone was counted.
    """
    layout = planned.resolved.layout
    if layout.pipeline == 1:
        return planned
    training = planned.resolved.per_device.training
    micro_batches = training.batch_size // training.resolved_micro_batch_size
    passes = micro_batches * layout.stages_per_rank
    by_phase = {phase: spent.seconds / passes for phase, spent in planned.price.by_phase.items()}
    backward = by_phase.get("backward", 0.0)
    stage = StageSeconds(by_phase.get("forward", 0.0), backward / 2, backward / 2, by_phase.get("recompute", 0.0))
    schedule = pipeline_schedule(
        layout.schedule, layout.pipeline, micro_batches, stages_per_rank=layout.stages_per_rank
    )
    timeline = simulate_pipeline(schedule, [stage] * schedule.stages)
    return dataclasses.replace(planned, bubble_seconds=timeline.idle_seconds[0])
