"""The planner: one function for this machine, for the devices of a datasheet, and for any number of them.

`resolve` sets the fields that a recipe leaves open, from its tokenizer and the devices that it is for; `plan_resolved`
counts and prices. Several ranks of this machine are measured: each of their operators, and their collectives. Those of
a datasheet's devices are planned part by part, as `plan_layout` does. `SharedPlans` plans several runs in one process:
equal steps are counted and timed once.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.pipeline_simulation import StageSeconds, simulate_pipeline
from napkin.accounting.pricing import Price, Spent
from napkin.accounting.rank_seconds import Communication
from napkin.data.batches import Batches, repetition_warnings
from napkin.data.mixing import TokenMixture
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.kernels.loss.cross_entropy import loss_chunk_size
from napkin.planning.layouts.layout_plan import LayoutPlan, plan_layout
from napkin.planning.layouts.stages import schedule_of, stages_of_ranks
from napkin.planning.step.deterministic_price import deterministic_price
from napkin.planning.step.kernel_choice import (
    choose_compile,
    choose_kernels,
    choose_triton,
    graph_bytes,
    refuse_impossible_compile,
    refuse_impossible_graph,
    with_kernels_that_run,
)
from napkin.planning.step.machine import CatalogueMachine, Machine, Progress, machine_of
from napkin.planning.step.memory_savings import largest_micro_batch, refuse_far_too_much
from napkin.planning.step.run_plan import Plan
from napkin.planning.step.site import Site
from napkin.recipe.data_config import paths_and_weights
from napkin.recipe.layout import refuse_impossible_layout
from napkin.recipe.mixture import open_mixture
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.runs.accounting_files import PlannedFile
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.train_step.step_ledger import count_step


def plan(
    recipe: Recipe, on: str | Machine | None = None, *, ranks: Ranks = ALONE, progress: Progress = lambda doing: None
) -> Plan:
    """Predict memory, FLOPs and seconds of a run before it starts, without allocating the model.

    `on` names devices of the catalogue, as in "64xH100"; None is this machine, which is measured once and divided among
    `ranks`. A recipe that sets model.vocab_size needs no tokenizer file. `progress` is called with each stage.

    Raises NapkinError where the recipe does not suit the devices: a batch that does not divide among them, a number
    format that they lack, a step so far beyond their memory that counting it would take minutes. A plan that exceeds
    the memory by less is returned: see `Plan.fits`.
    """
    machine = machine_of(on, ranks=ranks, device=recipe.training.device)
    planned = plan_resolved(resolve(recipe, machine, progress=progress), machine, progress=progress)
    # A plan needs no text: files that do not exist yet are left out.
    try:
        files = {path: TokenFile.open(path) for path in paths_and_weights(recipe.data.train)[0]}
    except NapkinError:
        return planned
    mixture = open_mixture(planned.recipe, files.__getitem__)
    with contextlib.suppress(NapkinError):
        return with_text(planned, mixture)
    return planned


def resolve(recipe: Recipe, machine: Machine, *, progress: Progress = lambda doing: None) -> ResolvedRecipe:
    """The recipe with every default written out; with micro_batch_size "auto" its step is counted, and on a CPU of
    this machine the forms of its blocks are timed, if they were not before.

    Raises NapkinError where the batch does not divide among the devices, and where the devices do not support
    what the recipe asks for.
    """
    recipe = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, vocab_size=vocab_size_of(recipe)),
        optimizer=dataclasses.replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps),
    )
    precision = machine.precision(recipe.training.precision)
    training = machine.training(recipe.training, precision)
    if training.loss_chunk_size == "auto":
        chunk = loss_chunk_size(-(-recipe.model.vocab_size // recipe.parallelism.tensor), machine.gpu_bytes)
        training = dataclasses.replace(training, loss_chunk_size=chunk)
    recipe = dataclasses.replace(recipe, training=training)
    recipe = choose_triton(with_kernels_that_run(recipe, machine), precision, machine)
    recipe = choose_kernels(recipe, precision, machine, progress=progress)
    resolved = ResolvedRecipe(recipe, precision, machine.target, machine.n_devices)
    _ = resolved.per_device
    refuse_impossible_layout(recipe, resolved.layout)
    if machine.measured:
        refuse_impossible_compile(resolved)
        refuse_impossible_graph(resolved)
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
    steps, files, mixture = planned.steps, batches.tokens.files, ()
    if len(files) > 1:
        each = zip(files, batches.epochs_of_files(steps), batches.windows_of_files, strict=True)
        mixture = tuple(
            PlannedFile(str(file.path), file.n_tokens, epochs, share=epochs * n_windows / (steps * batches.batch_size))
            for file, epochs, (n_windows, _) in each
        )
    return dataclasses.replace(
        planned,
        epochs=tokens.epochs(steps * planned.tokens_per_step),
        mixture=mixture,
        warnings=tuple(repetition_warnings(batches, steps)),
    )


Planner = Callable[..., Plan]
"""Plans the step of a resolved recipe, as `plan_resolved` does: (resolved, machine, *, progress)."""


def plan_resolved(resolved: ResolvedRecipe, machine: Machine, *, progress: Progress = lambda doing: None) -> Plan:
    """Count and price the step of a resolved recipe, for one device; on several ranks, for that of rank 0.

    In a pipeline, other ranks are counted too: all that have other stages on this machine, of a datasheet's devices the
    one that needs most.
    """
    machine.prepare(resolved.recipe.training)
    progress("counting the step")
    refuse_far_too_much(resolved, machine.device_name, machine.memory_bytes)
    pipeline, layout = resolved.layout.pipeline, None
    counted = range(pipeline)
    if isinstance(machine, CatalogueMachine) and machine.n_devices > 1:
        connected = machine.site(resolved.precision, machine.ceilings(resolved.precision)).interconnect is not None
        layout = plan_layout(resolved, machine, progress=progress) if connected else None
        counted = counted if layout is None else sorted({0, layout.largest_rank})
    ledgers: dict[int, Ledger] = {}
    for rank in (place * (resolved.world_size // pipeline) for place in counted):
        named = f"counting the step of rank {rank}" if rank else "counting the step"
        ledgers[rank] = count_step(
            resolved, rank, progress=lambda calls, named=named: progress(f"{named}: {calls:,} operator calls")
        )
    if machine.measured:
        progress("measuring this machine, once")
    ceilings = machine.ceilings(resolved.precision)
    site = machine.site(resolved.precision, ceilings)

    def price(parts: Sequence[Ledger]) -> list[Price]:
        return machine.price(resolved, parts, ceilings, progress)

    if layout is not None:
        planned = _planned_layout(resolved, ledgers, price([ledgers[0]])[0], site, layout)
    elif machine.n_devices > 1:
        planned = planned_ranks(resolved, ledgers, price, site)
    else:
        planned = Plan(resolved, ledgers[0], price([ledgers[0]])[0], site)
    planned = dataclasses.replace(planned, deterministic=deterministic_price(resolved, ledgers[0], ceilings))
    return _with_graph(_with_compile(planned, machine, progress), machine)


def _with_compile(planned: Plan, machine: Machine, progress: Progress) -> Plan:
    """The plan with what compilation costs and saves, and with the bytes of a compiled step where blocks are compiled;
    on this machine, with the choice written out, so that a resumed run computes the same."""
    resolved = planned.resolved
    ceilings = machine.ceilings(resolved.precision)
    estimate = choose_compile(resolved, planned.ledger, ceilings, here=machine.measured)
    if machine.measured:
        resolved = resolved.with_training(compile="on" if estimate.chosen else "off")
    compiled = planned.compiled if estimate.chosen else None
    if estimate.chosen and compiled is None:
        progress("counting the compiled step")
        # If torch.compile cannot trace a block here, the uncompiled step's bytes are used, and the plan says so.
        with contextlib.suppress(NapkinError):
            compiled = count_step(resolved, compiled=True)
    return dataclasses.replace(planned, resolved=resolved, compile_estimate=estimate, compiled=compiled)


def _with_graph(planned: Plan, machine: Machine) -> Plan:
    """The plan with the bytes of a CUDA graph, where there is one; on this machine, with the choice written out."""
    planned = dataclasses.replace(planned, graph_bytes=graph_bytes(planned, here=machine.measured))
    if not machine.measured:
        return planned
    chosen = "on" if planned.graph_bytes else "off"
    return dataclasses.replace(planned, resolved=planned.resolved.with_training(cuda_graphs=chosen))


def _planned_layout(
    resolved: ResolvedRecipe, ledgers: Mapping[int, Ledger], price: Price, site: Site, layout: LayoutPlan
) -> Plan:
    """The plan of a datasheet's devices: bytes and FLOPs of the counted ranks, the seconds of the layout's plan.

    `price` has the seconds of rank 0's operators; they are scaled to what the busiest rank computes, which
    `Plan.computing` explains.
    """
    exposed = sum(seconds for kind, seconds in layout.by_kind.items() if kind.endswith("exposed"))
    bubble = layout.by_kind.get("bubble", 0.0)
    factor = (layout.seconds - exposed - bubble) / price.seconds

    def scaled(parts: Mapping[Any, Spent]) -> dict[Any, Spent]:
        return {name: Spent(factor * each.seconds, factor * each.byte_bound_seconds) for name, each in parts.items()}

    return Plan(
        resolved,
        ledgers[0],
        dataclasses.replace(
            price,
            seconds=factor * price.seconds,
            byte_bound_seconds=factor * price.byte_bound_seconds,
            by_operator=scaled(price.by_operator),
            by_module=scaled(price.by_module),
            by_phase=scaled(price.by_phase),
            by_call_site=scaled(price.by_call_site),
            factor=layout.factor,
        ),
        site,
        ranks=ledgers if len(ledgers) > 1 else {},
        layout=dataclasses.replace(layout, counted_bytes=max(ledger.peak_bytes for ledger in ledgers.values())),
        communication=Communication.of(ledgers[0]),
        communication_seconds=exposed + sum(layout.hidden.values()),
        exposed_seconds=exposed,
        bubble_seconds=bubble,
        operator_seconds=price.seconds,
    )


def planned_ranks(
    resolved: ResolvedRecipe,
    ledgers: Mapping[int, Ledger],
    price: Callable[[Sequence[Ledger]], list[Price]],
    site: Site,
) -> Plan:
    """The plan of ranks whose operators can be timed, among which rank 0 waits for collectives and for other stages."""
    layout, link, communication = resolved.layout, site.interconnect, Communication.of(ledgers[0])
    parts = [part for rank, ledger in ledgers.items() for part in _stages(resolved, rank, ledger)]
    prices = price([*ledgers.values(), *parts])
    whole, of_stages = prices[: len(ledgers)], prices[len(ledgers) :]
    ranks = ledgers if len(ledgers) > 1 else {}
    planned = Plan(resolved, ledgers[0], whole[0], site, ranks=ranks, communication=communication)
    if link is None:
        return planned
    bubble = 0.0
    if ranks:
        training = resolved.per_device.training
        micro_batches = training.batch_size // training.resolved_micro_batch_size
        seconds: dict[int, StageSeconds] = {}
        numbers = (stage for stages in stages_of_ranks(layout) for stage in stages)
        for stage, each in zip(numbers, of_stages, strict=True):
            phases = (_seconds_in(each, phase) / micro_batches for phase in ("forward", "backward", "recompute"))
            forward, backward, again = phases
            # If a schedule splits the backward pass, both halves are taken to be equally long.
            seconds[stage] = StageSeconds(forward, backward / 2, backward / 2, again)
        schedule = schedule_of(layout.schedule, layout.pipeline, layout.stages_per_rank, micro_batches)
        sends = communication.only("send")
        sending = sends.seconds(link) / sends.times if sends.times else 0.0
        in_order = [seconds[stage] for stage in sorted(seconds)]
        # The ranks agree on the norm of all gradients: none updates before the last one can, nor begins the next step.
        last = max(_seconds_in(each, "optimizer") for each in whole) - _seconds_in(whole[0], "optimizer")
        bubble = simulate_pipeline(schedule, in_order, send_seconds=sending).idle_seconds[0] + last
    # Messages between stages are part of the simulated pipeline.
    beside = communication.without("send") if ranks else communication
    return dataclasses.replace(
        planned,
        communication_seconds=communication.seconds(link),
        exposed_seconds=beside.exposed_seconds(
            link,
            forward_seconds=_seconds_in(whole[0], "forward"),
            backward_seconds=_seconds_in(whole[0], "backward") + _seconds_in(whole[0], "recompute"),
        ),
        bubble_seconds=bubble,
    )


def _stages(resolved: ResolvedRecipe, rank: int, ledger: Ledger) -> list[Ledger]:
    """The rows of each stage that a rank of a pipeline has, in the order of its stages; none without a pipeline."""
    layout = resolved.layout
    if layout.pipeline == 1:
        return []
    stages = stages_of_ranks(layout)[layout.coordinates(rank)["pipeline"]]
    blocks = layout.blocks_of_stages(resolved.recipe.model.n_layers)
    rows: dict[int, list[Row]] = {stage: [] for stage in stages}
    for row in ledger.rows:
        if row.phase == "optimizer":
            continue
        name, _, rest = row.module.partition(".")
        if name == "blocks":
            number = int(rest.partition(".")[0])
            stage = next(stage for stage in stages if number in blocks[stage])
        else:
            stage = stages[0] if name in ("embedding", "positions") else stages[-1]
        rows[stage].append(row)
    return [dataclasses.replace(ledger, rows=tuple(rows[stage])) for stage in stages]


def _seconds_in(price: Price, phase: str) -> float:
    spent = price.by_phase.get(phase)
    return 0.0 if spent is None else spent.seconds


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
        "cuda_graphs",
    },
}
"""Fields that do not affect a step's operators and shapes. Compilation and graphs are decided for each run."""
_ZERO_OR_NOT = {"momentum", "beta1", "beta2", "weight_decay", "dropout"}
"""Fields that matter only by being 0 or not: at 0 an operator is left out."""


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
        known = self._plans.get(key)
        if known is None:
            plan = plan_resolved(resolved, machine, progress=progress)
        else:
            plan = _with_compile(dataclasses.replace(known, resolved=resolved), machine, progress)
        if known is None or known.compiled is None:
            # A plan that has counted the compiled step too can be shared by compiled and uncompiled runs.
            self._plans[key] = plan
        return plan


def step_key(recipe: Recipe) -> tuple[Any, ...]:
    """The parts of a resolved recipe that decide on the operators of its step: equal keys, equal ledgers."""
    return tuple(
        (table, name, bool(value) if name in _ZERO_OR_NOT else value)
        for table, values in dataclasses.asdict(recipe).items()
        if table != "tracking"
        for name, value in values.items()
        if name not in _FREE.get(table, ())
    )
