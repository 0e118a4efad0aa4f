"""A plan as people see it."""

from napkin.accounting.plan import Plan
from napkin.cli.terminal import out, say
from napkin.report.table import reconcile_table
from napkin.training.precision import Precision
from napkin.units import format_bytes, format_rate, format_seconds


def describe_plan(plan: Plan, precision: Precision) -> None:
    """Print the plan's table and its verdict."""
    say(
        f"plan for {plan.device_name}: {precision.products} matrix products at most "
        f"{format_rate(plan.matmul_peak)}, measured; {format_bytes(plan.memory_bytes)} free"
    )
    out.print(reconcile_table(plan.table()))
    alive = ", ".join(
        f"{category} {format_bytes(size)}"
        for category, size in sorted(plan.ledger.peak_by_category.items(), key=lambda item: -item[1])
    )
    say(f"alive at the peak: {alive}")
    for operator, calls in plan.ledger.unknown_operators.items():
        say(f"operator {operator} is not in napkin's tables: the FLOPs of {calls} calls are missing above")
    if plan.calibration_disturbed:
        say("other programs held this machine while it was measured: `napkin calibrate` measures it again")
    if plan.fits:
        say(f"it fits, and takes about {format_seconds(plan.seconds)}")
