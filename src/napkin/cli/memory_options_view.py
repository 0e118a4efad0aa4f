"""The table of `napkin plan --memory-options`."""

from rich.table import Table

from napkin.accounting.plan import Plan
from napkin.cli.terminal import out, say
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.catalogue import Device
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.planning.memory_options import MemoryOption, describe, memory_options
from napkin.planning.preparation import Progress
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.units import format_bytes, format_flops, format_seconds


def find_memory_options(
    recipe: Recipe, precision: Precision, plan: Plan, device: Device | None, progress: Progress
) -> list[MemoryOption]:
    """The memory options of a plan for this machine or, with `device`, for another."""
    ceilings = calibration_of_this_machine(precision.device_type) if device is None else CatalogueCeilings(device)
    return memory_options(recipe, precision, plan, ceilings, device=device, progress=progress)


def describe_memory_options(plan: Plan, found: list[MemoryOption]) -> None:
    """Print what each memory option makes of peak, FLOPs and seconds."""
    table = Table("with training.", "peak", "saves", "FLOPs", "seconds per step", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    ledger = plan.ledger
    table.add_row(
        "(the plan)",
        format_bytes(ledger.peak_bytes),
        "",
        format_flops(ledger.hardware_flops),
        format_seconds(plan.seconds_per_step),
    )
    for memory_option in found:
        table.add_row(
            describe(memory_option.fields),
            format_bytes(memory_option.peak_bytes),
            _share(1 - memory_option.peak_bytes / ledger.peak_bytes),
            _change(memory_option.hardware_flops / ledger.hardware_flops - 1),
            _change(memory_option.seconds / plan.seconds_per_step - 1),
        )
    out.print(table)
    say("bytes and FLOPs by count, recomputation counted; seconds by rooflines, each option alone", style="dim")


def _share(saved: float) -> str:
    return f"{saved:.1%}"


def _change(by: float) -> str:
    return f"{by:+.1%}"
