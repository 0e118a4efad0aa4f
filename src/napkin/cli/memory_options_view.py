"""The table of `napkin plan --memory-options`."""

from rich.table import Table

from napkin.cli.terminal import out, say
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.catalogue import find_device
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.planning.machine import Progress
from napkin.planning.memory_options import MemoryOption, describe, memory_options
from napkin.planning.run_plan import Plan
from napkin.units import format_bytes, format_flops, format_seconds, parse_devices


def find_memory_options(plan: Plan, on: str | None, progress: Progress) -> list[MemoryOption]:
    """The memory options of a plan for this machine or, with `on`, for devices of the catalogue."""
    if on is None:
        ceilings = calibration_of_this_machine(plan.resolved.precision.device_type)
        return memory_options(plan, ceilings, progress=progress)
    device = find_device(parse_devices(on)[1])
    return memory_options(plan, CatalogueCeilings(device), host_bandwidth=device.host_bandwidth, progress=progress)


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
