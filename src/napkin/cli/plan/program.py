"""`napkin plan program FILE.py:build`: a program of the user's own, planned on the ranks that differ."""

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.options import JsonOption, command, require_above_zero
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_flops, format_seconds, format_three_digits

if TYPE_CHECKING:
    from napkin.planning.programs.program_plan import ProgramPlan


@dataclass(frozen=True)
class ProgramOptions(JsonOption):
    """Plan a program of your own on many ranks, without running it: napkin plan program FILE.py:build --on 64xH100.
    The function builds module, optimizer and batch on each rank and divides them by torch's own API; it runs here, with
    your rights, on fake tensors and a fake process group, once for each rank that differs."""

    program: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:NAME")]
    """The function, which returns the module, its optimizer and a batch, and may return a step as the fourth."""
    on: str | None = None
    """Devices, one for each rank, as in 64xH100. None is processes on CPUs, without seconds."""
    ranks: int | None = None
    """Number of ranks; None is one per device."""
    step: str | None = None
    """Name of the function of the same file that takes module, optimizer and batch and trains once. None is forward
    pass, loss, backward pass and update."""
    most_traced: int = 32
    """The most ranks that are traced, of more than 8."""


@command("plan program", ProgramOptions)
def main(options: ProgramOptions) -> None:
    require_above_zero(options, "ranks", "most_traced")
    # The program's own output is kept apart from the result.
    with progress_line(f"planning {options.program}") as line, contextlib.redirect_stdout(sys.stderr):
        from napkin.planning.programs.program_plan import plan_program, program_of

        build, step = program_of(options.program, options.step)
        plan = plan_program(
            build, step, ranks=options.ranks, on=options.on, most_traced=options.most_traced, progress=line.retitle
        )
    if options.json:
        print_json(plan.as_values())
    else:
        _print(plan)
    if not plan.fits and plan.cluster is not None:
        device = plan.cluster.device
        raise NapkinError(
            f"a step takes {format_bytes(plan.peak_bytes)}, {format_bytes(plan.reserved_bytes or 0)} reserved, and a "
            f"{device.name} has {format_bytes(device.usable_bytes)}: divide the program among more ranks, or use "
            "a smaller batch"
        )


def _print(plan: "ProgramPlan") -> None:
    from napkin.planning.programs.rank_classes import as_ranges

    verdict = "" if plan.cluster is None else ": it fits" if plan.fits else ": it does not fit"
    say(f"{plan.name} on {plan.where}{verdict}")
    names = sorted({category for each in plan.ranks for category, size in each.ledger.peak_by_category.items() if size})
    headings = ["ranks", "FLOPs", "peak bytes", "reserved", *names]
    rows = []
    for each in plan.ranks:
        ledger = each.ledger
        sizes_of: dict[str, int] = {**ledger.peak_by_category}
        reserved = "–" if ledger.reserved_bytes is None else format_bytes(ledger.reserved_bytes)
        sizes = [format_bytes(sizes_of.get(name, 0)) for name in names]
        rows.append(
            (as_ranges(each.stands_for), format_flops(ledger.flops), format_bytes(ledger.peak_bytes), reserved, *sizes)
        )
    print_table(headings, rows, align="l" + "r" * (len(headings) - 1))
    timed = [(each, each.time) for each in plan.ranks if each.time is not None]
    if timed:
        say()
        seconds = [
            (
                as_ranges(each.stands_for),
                *map(
                    format_seconds,
                    (
                        time.seconds,
                        time.price.seconds,
                        time.exposed_seconds,
                        time.hidden_seconds,
                        time.bubble_seconds,
                    ),
                ),
            )
            for each, time in timed
        ]
        print_table(("ranks", "seconds", "computing", "exposed", "hidden", "bubble"), seconds, align="lrrrrr")
    collectives = [
        (
            as_ranges(each.stands_for),
            sums.operation,
            f"{sums.calls:,}",
            format_bytes(sums.data_bytes),
            "; ".join(as_ranges(group) for group in sums.groups[:4]) + (" …" if len(sums.groups) > 4 else ""),
        )
        for each in plan.ranks
        for sums in each.collectives
    ]
    if collectives:
        say()
        print_table(("ranks", "collective", "calls", "bytes", "among"), collectives, align="llrrl")
    if plan.n_ranks > 1:
        say(
            "largest over mean: "
            + ", ".join(f"{name} {format_three_digits(value)}" for name, value in plan.imbalance.items())
        )
    for note in plan.notes:
        say(note)
