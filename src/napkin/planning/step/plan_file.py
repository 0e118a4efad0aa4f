"""A plan as it is stored in plan.json, with what its checkpoints take and what failures cost.

A checkpoint costs bytes on the disk, and the copy in memory that it is written from.
"""

import dataclasses
import functools
import math
import platform
from datetime import UTC, datetime
from typing import Any

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import napkin
from napkin.accounting.failures import failure_model
from napkin.accounting.pricing import Price
from napkin.checkpoint.folder import checkpoint_bytes, kept_checkpoints
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.optim.registry import build_optimizer
from napkin.planning.step.failure_cost import failures_of_run
from napkin.planning.step.kernel_choice import describe_compile
from napkin.planning.step.run_plan import Plan
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.runs.accounting_files import PlanFile, PlannedDevice, PlannedFailures
from napkin.units import format_bytes


def fields_of_price(price: Price) -> dict[str, Any]:
    """The fields of plan.json that a price gives: seconds of a step by phase, operator and module."""
    return {
        "seconds_factor": price.factor,
        "conditions": price.conditions,
        "seconds_by_phase": {name: each.seconds for name, each in price.by_phase.items()},
        "seconds_by_operator": {name: each.seconds for name, each in price.by_operator.items()},
        "byte_bound_by_operator": {name: each.byte_bound_seconds for name, each in price.by_operator.items()},
        "seconds_by_module": {name: each.seconds for name, each in price.by_module.items()},
        "byte_bound_by_module": {name: each.byte_bound_seconds for name, each in price.by_module.items()},
    }


def plan_file_of(plan: Plan) -> PlanFile:
    """The contents of a run's plan.json: a plan in bytes, FLOPs, seconds and dollars, with what it was made on."""
    price, precision, site = plan.price, plan.resolved.precision, plan.site
    return PlanFile(
        napkin=napkin.__version__,
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
        created=datetime.now(UTC).replace(microsecond=0),
        device=PlannedDevice(
            name=site.name,
            kind=precision.device_type,
            matmul_peak=site.matmul_peak,
            format=precision.products,
            precision=precision.name,
            memory_bytes=site.memory_bytes,
        ),
        formats={usage.what: usage.format for usage in precision.usage()},
        steps=plan.steps,
        tokens_per_step=plan.tokens_per_step,
        epochs=plan.epochs,
        mixture=plan.mixture,
        fits=plan.fits,
        seconds=plan.seconds,
        checkpoint_bytes=checkpoint_bytes(plan.ledger),
        peak_by_category={str(category): size for category, size in plan.memory.peak_by_category.items()},
        flops_by_phase=dict(plan.flops_by_phase),
        dollars=plan.dollars,
        kilowatt_hours=plan.kilowatt_hours,
        **fields_of_price(price),
        communication={
            "bytes": plan.communication.bytes,
            "seconds": plan.communication_seconds,
            "exposed_seconds": plan.exposed_seconds,
            "bubble_seconds": plan.bubble_seconds,
        },
        compile={**dataclasses.asdict(plan.compile_estimate), "says": describe_compile(plan)},
        deterministic="" if plan.deterministic is None else plan.deterministic.describe(),
        unknown_operators=plan.ledger.unknown_operators,
        pipeline_peak_bytes=plan.pipeline_peak_bytes,
        failures=planned_failures(plan),
        predicted_loss=plan.predicted_loss,
        table=tuple(plan.table()),
    )


def whole_checkpoint_bytes(plan: Plan) -> int:
    """Bytes of the files of all ranks together."""
    # A step of tuning is counted in a single process.
    if not plan.resolved.layout.divides_state or isinstance(plan.recipe, TuningRecipe):
        return checkpoint_bytes(plan.ledger)
    optimizer = plan.recipe.optimizer
    options = tuple(optimizer.options.items())
    weights = plan.resolved.precision.weights_dtype
    return _stored_bytes(plan.recipe.model, optimizer.name, options, weights, bool(optimizer.average_decay))


@functools.lru_cache(maxsize=64)
def _stored_bytes(
    model: ModelConfig, optimizer: str, options: tuple[tuple[str, float], ...], weights: torch.dtype, average: bool
) -> int:
    """Bytes of the parameters and of the optimizer state of a whole model, whose parameters are in `weights`."""
    with FakeTensorMode():
        made = Transformer(model)
        settings: dict[str, Any] = dict(options)
        state = build_optimizer(optimizer, made, **settings).all_state()
        numel = sum(parameter.numel() for parameter in made.parameters())
        return (
            numel * weights.itemsize
            + sum(tensor.nbytes for tensors in state.values() for tensor in tensors.values())
            + 4 * numel * average
        )


def writes_in_background(plan: Plan) -> bool:
    """True if a background thread writes the checkpoints: if the recipe says so, or leaves it open and the copy fits.

    On a CPU the copy is in the same memory as the step's tensors, so both must fit; with a GPU it may take half of the
    host's free memory. Raises NapkinError where the recipe asks for a copy that does not fit.
    """
    training = plan.recipe.training
    if training.checkpoint_writing == "wait":
        return False
    copy_bytes = checkpoint_bytes(plan.ledger)
    if plan.resolved.precision.device_type == "cpu":
        free = plan.site.memory_bytes - plan.memory.peak_bytes
    else:
        free = psutil.virtual_memory().available // 2
        if plan.resolved.layout.divides_state:
            # Each rank of this machine copies its own parts.
            free //= max(1, min(plan.site.n_devices, torch.cuda.device_count()))
    if copy_bytes <= free:
        return True
    if training.checkpoint_writing == "auto":
        return False
    raise NapkinError(
        f"training.checkpoint_writing is 'background', whose copy takes {format_bytes(copy_bytes)} of host memory, "
        f"but only {format_bytes(max(0, free))} are free: use 'wait' or 'auto'"
    )


def describe_checkpoints(plan: Plan) -> str:
    copy_bytes, size = checkpoint_bytes(plan.ledger), whole_checkpoint_bytes(plan)
    kept = kept_checkpoints(plan.recipe.training)
    how = "by the training loop"
    if writes_in_background(plan):
        copied = format_bytes(copy_bytes)
        how = f"in the background, from a copy of {copied} in host memory, which no figure above includes"
    frozen = plan.ledger.frozen_bytes
    once = f", besides {format_bytes(frozen)} of frozen weights, once" if frozen else ""
    return (
        f"checkpoints: {format_bytes(size)} each, up to {kept} kept, {format_bytes((kept + 1) * size)} of disk while "
        f"one is written{once}; written {how}"
    )


def planned_failures(plan: Plan) -> PlannedFailures:
    """Failures over all steps of a plan, with a checkpoint every `training.checkpoint_every` steps."""
    site, training, layout = plan.site, plan.recipe.training, plan.resolved.layout
    # Nodes whose ranks write a part of a checkpoint: of replicas, only the first is written.
    writing_nodes, copies = 1, 1
    if layout.divides_state:
        if not layout.shard_optimizer:
            # Ranks of context are copies, too, where they are not among those of FSDP2.
            copies = layout.batch_parts // max(layout.shard, layout.expert)
            copies *= layout.context if layout.shard == 1 else 1
        n_nodes = math.ceil(site.n_devices / site.interconnect.devices_per_node) if site.interconnect else 1
        writing_nodes = max(1, n_nodes // copies)
    # On other machines in the background if the recipe allows it, since their free host memory is not known.
    background = training.checkpoint_writing != "wait"
    if training.checkpoint_writing == "auto" and site.measured:
        background = writes_in_background(plan)
    model = failure_model(
        n_devices=site.n_devices,
        copied_bytes=checkpoint_bytes(plan.ledger),
        written_bytes=whole_checkpoint_bytes(plan),
        writing_nodes=writing_nodes,
        host_bandwidth=site.host_bandwidth,
        background=background,
        mtbf_hours=site.mtbf_hours,
        restart_minutes=site.restart_minutes,
    )
    step = plan.seconds_per_step
    interval = min(training.checkpoint_every, plan.steps) * step
    failures = failures_of_run(
        model, plan.seconds, interval_seconds=interval, shortest_interval_seconds=step, useful_dollars=plan.dollars
    )
    return dataclasses.replace(
        failures,
        interval_steps=training.checkpoint_every,
        best_interval_steps=max(1, round(failures.best_interval_seconds / step)),
        longest_interval_steps=max(1, math.floor(failures.longest_interval_seconds / step)),
    )
