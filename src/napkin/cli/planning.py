"""A plan as people and programs see it."""

from datetime import UTC, datetime
from typing import Any

import msgspec

import napkin
from napkin.accounting.plan import Plan
from napkin.cli.terminal import out
from napkin.report.table import reconcile_table
from napkin.training.precision import Precision
from napkin.units import format_bytes, format_rate, format_seconds


def describe_plan(plan: Plan, precision: Precision) -> None:
    """Print the plan's table and its verdict."""
    out.print(
        f"plan for {plan.device_name}: {precision.products} matrix products at most "
        f"{format_rate(plan.matmul_peak)}, measured; {format_bytes(plan.memory_bytes)} free"
    )
    out.print(reconcile_table(plan.table()))
    alive = ", ".join(
        f"{category} {format_bytes(size)}"
        for category, size in sorted(plan.ledger.peak_by_category.items(), key=lambda item: -item[1])
    )
    out.print(f"alive at the peak: {alive}")
    for operator, calls in plan.ledger.unknown_operators.items():
        out.print(f"operator {operator} is not in napkin's tables: the FLOPs of {calls} calls are missing above")
    if plan.fits:
        out.print(f"it fits, and takes about {format_seconds(plan.seconds)}")


def plan_as_json(plan: Plan, precision: Precision) -> dict[str, Any]:
    """The plan as plan.json holds it."""
    return {
        "napkin": napkin.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": {
            "name": plan.device_name,
            "kind": precision.device_type,
            "matmul_peak": plan.matmul_peak,
            "format": precision.products,
            "memory_bytes": plan.memory_bytes,
        },
        "steps": plan.steps,
        "tokens_per_step": plan.tokens_per_step,
        "fits": plan.fits,
        "seconds": plan.seconds,
        "peak_by_category": plan.ledger.peak_by_category,
        "flops_by_phase": plan.ledger.flops_by("phase"),
        "seconds_by_operator": plan.price.seconds_by_operator,
        "unknown_operators": plan.ledger.unknown_operators,
        "table": msgspec.to_builtins(plan.table()),
    }
