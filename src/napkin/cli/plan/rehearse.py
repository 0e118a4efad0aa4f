"""`napkin rehearse SCRIPT.py`: a training script run without a GPU until its step is counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.options import JsonOption, parse, require_above_zero, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_count, format_flops, format_seconds, format_share

if TYPE_CHECKING:
    from napkin.planning.rehearsal.rehearsal import Rehearsal

MOST_VARIABLES = 12


@dataclass(frozen=True)
class RehearseOptions(JsonOption):
    """Run an unmodified training script without a GPU, on fake tensors and as rank 0, until its third step has been
    counted, and print what a step takes. The script is code that runs with your rights, in a folder of its own that
    links to the files of this one; data files may be absent. Options come before SCRIPT.py or after it; what follows
    `--` is the script's."""

    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT.py")]
    """The script."""
    on: str = "8xH100"
    """The devices that it shall believe in, as in 8xH100; on more than one it runs as under torchrun."""
    setup: str | None = None
    """A Python file that is run before it, where a module or a reader must be replaced."""
    torch: str | None = None
    """The release of torch that it will run under, as in 2.8, if not the one that is installed here."""
    seconds: float = 300.0
    """Seconds after which it is stopped."""
    memory: float = 4.0
    """GB of memory after which it is stopped."""


@takes(RehearseOptions)
def main(arguments: Sequence[str]) -> None:
    own, given = _divided(list(arguments))
    options = parse(RehearseOptions, "rehearse", own)
    require_above_zero(options, "seconds", "memory")
    with progress_line(f"rehearsing {options.script}"):
        from napkin.planning.rehearsal.rehearsal import rehearse

        rehearsal = rehearse(
            options.script,
            given,
            on=options.on,
            setup=options.setup,
            torch=options.torch,
            most_seconds=options.seconds,
            most_bytes=int(options.memory * 1e9),
        )
    if options.json:
        print_json(rehearsal.as_values())
    else:
        _print(rehearsal)
    if not rehearsal.fits:
        device = rehearsal.cluster.device
        raise NapkinError(
            f"the script takes {format_bytes(rehearsal.highest.bytes)}, and a {device.name} has "
            f"{format_bytes(device.usable_bytes)}: use a smaller batch per device, or recompute activations"
        )


def _divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The command's arguments and the script's: those after `--`, or those after the script's name that are not options
    of the command."""
    if "--" in arguments:
        at = arguments.index("--")
        return arguments[:at], arguments[at + 1 :]
    own, given, named = list[str](), list[str](), False
    waiting = False
    for argument in arguments:
        name = argument.partition("=")[0]
        if waiting or name in ("--on", "--setup", "--torch", "--seconds", "--memory"):
            own.append(argument)
            waiting = not waiting and "=" not in argument
        elif argument in ("--json", "--help", "-h"):
            own.append(argument)
        elif not named:
            own.append(argument)
            named = argument.endswith(".py") or not argument.startswith("-")
        else:
            given.append(argument)
    return own, given


def _print(found: "Rehearsal") -> None:
    ledger, cluster = found.ledger, found.cluster
    name = cluster.device.name if cluster.n_devices == 1 else f"{cluster.n_devices} × {cluster.device.name}"
    rows = [
        ("parameters", format_count(ledger.parameters)),
        ("FLOPs per step and device", format_flops(ledger.flops)),
        ("peak bytes, allocated", format_bytes(ledger.peak_bytes)),
        *(
            (f"  {category}", format_bytes(size))
            for category, size in sorted(ledger.peak_by_category.items(), key=lambda each: -each[1])
            if size
        ),
    ]
    if ledger.reserved_bytes is not None:
        rows.append(("peak bytes, reserved", format_bytes(ledger.reserved_bytes)))
    if found.highest.bytes > ledger.peak_bytes:
        rows.append((f"most bytes, {found.highest.place}", format_bytes(found.highest.bytes)))
        rows.append(("  reserved by then", format_bytes(found.highest.reserved_bytes)))
    rows.append(("memory of a device", format_bytes(cluster.device.usable_bytes)))
    seconds = f"{format_seconds(found.seconds)}, within a factor of {found.price.factor:.2f}"
    rows.append(("seconds per step", seconds))
    if found.exposed_seconds:
        share = format_share(found.exposed_seconds / found.seconds)
        rows.append(("  collectives, exposed", f"{format_seconds(found.exposed_seconds)}, {share}"))
    print_table((found.script, name), rows)
    if found.collectives:
        rows = [
            (operation, f"{each['calls']:.0f}", format_bytes(each["bytes"]), format_bytes(each["sent_bytes"]))
            for operation, each in found.collectives.items()
        ]
        print_table(("collective", "calls", "bytes", "sent by each"), rows)
    for note in found.notes:
        say(note)
    for operator, calls in ledger.unknown_operators.items():
        say(f"{operator} has no formula: the FLOPs of its {calls} calls are missing")
    if found.absent_files:
        say(f"absent, a small file stood in: {', '.join(found.absent_files)}")
    if found.environment:
        names = [f"{key}={value}" if value is not None else key for key, value in found.environment.items()]
        more = f" and {len(names) - MOST_VARIABLES} more (--json)" if len(names) > MOST_VARIABLES else ""
        say(f"environment variables that it reads: {', '.join(names[:MOST_VARIABLES])}{more}")
    say(f"counted in {format_seconds(found.rehearsing_seconds)} with {format_bytes(found.rehearsing_bytes)} here")
