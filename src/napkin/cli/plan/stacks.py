"""`napkin stacks`: the programs that a plan can be made for, and their calibration from runs of one's own."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import tyro

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.toml_files import read_toml
from napkin.units import format_share


@dataclass(frozen=True)
class StacksOptions(JsonOption):
    """Print the stacks that `napkin plan --stack` plans for, or everything that is said of one; with --fit, calibrate a
    stack from measured runs of one's own."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """A stack of the list, or a TOML file that describes one: `like`, and the fields that differ."""
    fit: str | None = None
    """A TOML file with a [[run]] for each measured run: recipe, the name of a recipe file; on, its devices; seconds of
    a step. Two factors, of computing and of sending, are found for the stack NAME."""
    out: str | None = None
    """Where to write the calibrated stack, for --stack."""


@command("stacks", StacksOptions)
def stacks_command(options: StacksOptions) -> None:
    from napkin.planning.layouts.stack import find_stack, stacks

    if options.fit is not None:
        _fit(options)
        return
    if options.out is not None:
        raise NapkinError("--out is where --fit writes a calibrated stack: give --fit RUNS.toml, or leave it out")
    if options.name is not None:
        stack = dataclasses.asdict(find_stack(options.name))
        if options.json:
            print_json(stack)
        else:
            print_table((), list(_flat(stack)))
        return
    if options.json:
        print_json({name: dataclasses.asdict(stack) for name, stack in stacks().items()})
        return
    rows = [
        (
            name,
            "fused" if stack.fuses else "–",
            "once per step" if stack.casts_once else "each micro-batch",
            "cut in pieces" if stack.overlaps_tensor else "waited for",
            "by node" if stack.exchange.sends == "nodes" else "a copy per expert",
            "–" if stack.memory is None else f"{_bytes_per_parameter(stack.memory):g} B",
        )
        for name, stack in stacks().items()
    ]
    heads = ("stack", "elementwise", "weights cast", "tensor ranks", "experts' tokens", "per parameter")
    print_table(heads, rows)
    say("`napkin stacks NAME` says all of one, with sources; `napkin plan --stack NAME` plans for it")


def _bytes_per_parameter(memory: Any) -> float:
    return memory.weight_bytes + memory.gradient_bytes + memory.state_bytes


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict) and name != "source":
            rows += _flat(value, f"{prefix}{name}.")
        elif name == "source":
            rows += [("source", f"{each['title']}, {each['date']}: {each['url']}") for each in value]
        else:
            rows.append((prefix + name, "–" if value is None else str(value)))
    return rows


def _fit(options: StacksOptions) -> None:
    assert options.fit is not None
    out = None if options.out is None else Path(options.out)
    if out is not None:
        refuse_existing(out)
    name = options.name or "napkin"
    with progress_line("planning") as line:
        from napkin.planning.layouts.stack import find_stack, stacks

        if name not in stacks():
            raise NapkinError(f"--fit calibrates a stack of the list, not {name!r}: use one of {', '.join(stacks())}")
        from napkin.planning.layouts.stack_plan import calibrate_stack

        calibration = calibrate_stack(_measured(Path(options.fit)), find_stack(name), progress=line.retitle)
    values = calibration.changes(name)
    if options.json:
        print_json({**values, "before": calibration.before, "left_out": calibration.left_out})
    else:
        rows = [
            (str(number), f"{before:+.1%}", f"{left_out:+.1%}")
            for number, (before, left_out) in enumerate(
                zip(calibration.before, calibration.left_out, strict=True), start=1
            )
        ]
        print_table(("run", "planned before", "by the other runs' factors"), rows)
        say(
            f"computing takes {values['computing']:.3g} times as long as planned, sending {values['sending']:.3g} "
            f"times; a run that was left out is {format_share(calibration.median_left_out)} off at the median, "
            f"{format_share(calibration.median_before)} before; plans are expected within a factor of "
            f"{values['factor']:.3g}"
        )
    if out is not None:
        with folder_for(out):
            atomic_write_text(out, tomli_w.dumps(values))
        say(f"wrote {out}: plan with --stack {out}")


def _measured(path: Path) -> list[Any]:
    from napkin.planning.layouts.stack_plan import MeasuredRun
    from napkin.recipe.toml_file import read_recipe

    values = read_toml(path, "a TOML file with a [[run]] for each measured run")
    given = values.get("run")
    if not isinstance(given, list) or not given:
        raise NapkinError(f"'{path}' has no [[run]]: give recipe, on and seconds of each measured run")
    runs = []
    for number, run in enumerate(given, start=1):
        where = f"'{path}': run {number}"
        if not isinstance(run, dict) or set(run) != {"recipe", "on", "seconds"}:
            raise NapkinError(f"{where}: give recipe, on and seconds, and nothing else")
        seconds = run["seconds"]
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e9:
            raise NapkinError(f"{where}: seconds is {seconds!r}: give those of a step, above 0")
        if not isinstance(run["recipe"], str) or not isinstance(run["on"], str):
            raise NapkinError(f"{where}: recipe and on are names, in quotation marks")
        recipe = path.parent / run["recipe"]
        runs.append(MeasuredRun(read_recipe(recipe), run["on"], float(seconds), run["recipe"]))
    return runs
