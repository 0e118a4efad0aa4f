"""The table of `napkin plan --levers`."""

from rich.table import Table

from napkin.accounting.plan import Plan
from napkin.cli.terminal import out, say
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.catalogue import Device
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.planning.memory_options import Lever, describe, levers
from napkin.planning.preparation import Progress
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.units import format_bytes, format_flops, format_seconds


def find_levers(
    recipe: Recipe, precision: Precision, plan: Plan, device: Device | None, progress: Progress
) -> list[Lever]:
    """The levers of a plan for this machine or, with `device`, for another."""
    ceilings = calibration_of_this_machine(precision.device_type) if device is None else CatalogueCeilings(device)
    return levers(recipe, precision, plan, ceilings, device=device, progress=progress)


def describe_levers(plan: Plan, found: list[Lever]) -> None:
    """Print what each lever makes of peak, FLOPs and seconds."""
    table = Table("with training.", "peak", "saves", "FLOPs", "seconds a step", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    ledger = plan.ledger
    table.add_row(
        "(the plan)",
        format_bytes(ledger.peak_bytes),
        "",
        format_flops(ledger.hardware_flops),
        format_seconds(plan.seconds_a_step),
    )
    for lever in found:
        table.add_row(
            describe(lever.fields),
            format_bytes(lever.peak_bytes),
            _share(1 - lever.peak_bytes / ledger.peak_bytes),
            _change(lever.hardware_flops / ledger.hardware_flops - 1),
            _change(lever.seconds / plan.seconds_a_step - 1),
        )
    out.print(table)
    say("bytes and FLOPs by count, recomputation counted; seconds by rooflines, each lever pulled alone", style="dim")


def _share(saved: float) -> str:
    return f"{saved:.1%}"


def _change(by: float) -> str:
    return f"{by:+.1%}"
