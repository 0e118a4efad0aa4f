"""A plan as it is stored in plan.json."""

import dataclasses
import platform
from collections.abc import Mapping
from datetime import UTC, datetime

import torch

import napkin
from napkin.accounting.pricing import Spent
from napkin.checkpoint.folder import checkpoint_bytes
from napkin.planning.step.failure_plan import planned_failures
from napkin.planning.step.kernel_choice import describe_compile
from napkin.planning.step.run_plan import Plan
from napkin.runs.accounting_files import PlanFile, PlannedDevice


def plan_file_of(plan: Plan) -> PlanFile:
    """The contents of plan.json for a plan."""
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
        peak_by_category={str(category): size for category, size in plan.ledger.peak_by_category.items()},
        flops_by_phase=dict(plan.flops_by_phase),
        seconds_factor=price.factor,
        conditions=price.conditions,
        dollars=plan.dollars,
        kilowatt_hours=plan.kilowatt_hours,
        seconds_by_phase=_seconds(price.by_phase),
        seconds_by_operator=_seconds(price.by_operator),
        byte_bound_by_operator=_byte_bound_seconds(price.by_operator),
        seconds_by_module=_seconds(price.by_module),
        byte_bound_by_module=_byte_bound_seconds(price.by_module),
        communication={
            "bytes": plan.communication.bytes,
            "seconds": plan.communication_seconds,
            "exposed_seconds": plan.exposed_seconds,
            "bubble_seconds": plan.bubble_seconds,
        },
        compile={**dataclasses.asdict(plan.compile_estimate), "says": describe_compile(plan)},
        unknown_operators=plan.ledger.unknown_operators,
        pipeline_peak_bytes=plan.pipeline_peak_bytes,
        failures=planned_failures(plan),
        predicted_loss=plan.predicted_loss,
        table=tuple(plan.table()),
    )


def _seconds(spent: Mapping[str, Spent]) -> dict[str, float]:
    return {name: each.seconds for name, each in spent.items()}


def _byte_bound_seconds(spent: Mapping[str, Spent]) -> dict[str, float]:
    return {name: each.byte_bound_seconds for name, each in spent.items()}
