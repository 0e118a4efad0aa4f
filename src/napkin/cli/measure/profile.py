"""`napkin profile`: the seconds of a step, and memory snapshots."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, command, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, parse_with_recipe
from napkin.cli.common.terminal import notify, print_json, print_rich, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from napkin.profiling.memory_snapshot import MemorySnapshot
    from napkin.profiling.step_profile import StepProfile

MOST_ROWS = 25


@dataclass(frozen=True)
class ProfileOptions(RecipeOptions, JsonOption):
    """Run a few training steps of a recipe, or of a run's recipe, under torch's profiler, and print where their seconds
    go beside what was planned: new weights, random tokens, no text needed. In place of the file, the folder of a run
    can be given. Under torchrun each rank profiles its own step, and rank 0 prints."""

    by: Literal["operator", "module", "phase"] = "operator"
    """What the rows are summed by; with module, equal layers share one row."""
    steps: int = 5
    """Steps to profile; for each, one more is timed without the profiler."""
    page: str | None = None
    """HTML file to write: all tables, the roofline, memory over the step, and a flame view by module."""
    trace: str | None = None
    """JSON file to write: the calls of one step for https://ui.perfetto.dev or chrome://tracing."""
    memory_snapshot: str | None = None
    """File to write: the allocations of one step in the format of torch's memory snapshots, for
    https://pytorch.org/memory_viz and `napkin profile memory`; as JSON where its name ends in .json."""


@takes(ProfileOptions)
def main(arguments: Sequence[str]) -> None:
    """Profile a recipe's step."""
    options, source = parse_with_recipe(ProfileOptions, "profile", _with_recipe_of_run(arguments))
    if not 1 <= options.steps <= 1000:
        raise NapkinError(f"--steps is {options.steps}: use 1 to 1000")
    from napkin.distributed.joining import join_ranks

    with join_ranks(options.recipe.training) as ranks:
        ranks.broadcast_from_zero(lambda: _refuse_existing(options))
        with progress_line("profiling", shown=ranks.is_rank_zero) as line:
            from napkin.profiling.profiler import profile_recipe

            title = source.path or options.preset or "the default recipe"
            snapshots: list[MemorySnapshot] = []
            profile = profile_recipe(
                options.recipe,
                steps=options.steps,
                ranks=ranks,
                progress=line.retitle,
                title=title,
                keep_snapshot=None if options.memory_snapshot is None else snapshots.append,
            )
        if ranks.is_rank_zero:
            _show(options, profile)
            from napkin.profiling.profile_page import write_profile_page
            from napkin.profiling.profile_table import write_trace

            for path, write in ((options.page, write_profile_page), (options.trace, write_trace)):
                if path is not None:
                    with folder_for(Path(path)):
                        write(profile, path)
                    notify(f"wrote {path}")
            if options.memory_snapshot is not None:
                from napkin.profiling.memory_snapshot import write_memory_snapshot

                with folder_for(Path(options.memory_snapshot)):
                    write_memory_snapshot(snapshots[0], options.memory_snapshot)
                peak = format_bytes(snapshots[0].measured.peak_bytes)
                notify(f"wrote {options.memory_snapshot}, of a step with {peak} at its peak by the meter")


def _with_recipe_of_run(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments with the recipe of a run in place of its folder."""
    if not arguments or arguments[0].startswith("-") or not Path(arguments[0]).is_dir():
        return arguments
    from napkin.runs.run_folder import RunFolder

    return [str(RunFolder.open(arguments[0]).path / "recipe.toml"), *arguments[1:]]


def _refuse_existing(options: ProfileOptions) -> None:
    paths = {name: getattr(options, name.replace("-", "_")) for name in ("page", "trace", "memory-snapshot")}
    outputs = [(name, path) for name, path in paths.items() if path is not None]
    for (name, path), (other, same) in combinations(outputs, 2):
        if path == same:
            raise NapkinError(f"--{name} and --{other} are both '{path}': name two files")
    for name, path in outputs:
        refuse_existing(Path(path), option=f"--{name}")


def _show(options: ProfileOptions, found: "StepProfile") -> None:
    from napkin.profiling.profile_table import headings, statements, table_rows
    from napkin.profiling.step_profile import as_values

    if options.json:
        print_json(as_values(found))
        return
    print_table(headings(options.by), table_rows(found, options.by, most=MOST_ROWS))
    say()
    for line in statements(found):
        say(line)
    if found.ranks:
        names = ("seconds", "operators", "collectives", "outside")
        rows = [(str(rank), *(format_seconds(each[name]) for name in names)) for rank, each in enumerate(found.ranks)]
        say()
        print_table(("rank", "step", "operators", "collectives", "in no operator"), rows)


@dataclass(frozen=True)
class MemoryOptions(JsonOption):
    """Show a memory snapshot, of napkin or of torch: the most bytes that were allocated, what they were, and what the
    allocator had reserved beside. The file is read as plain data and no code in it is run."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """A snapshot: a pickle, as torch.cuda.memory._dump_snapshot writes it, or JSON."""
    device: int | None = None
    """Whose history is shown; None is the device with most events."""
    recipe: str | None = None
    """The step's recipe, to show its plan beside the snapshot."""
    on: str | None = None
    """Device that the recipe is planned for; None is this machine."""
    page: str | None = None
    """HTML file to write: bytes over events, and the tables."""


@command("profile memory", MemoryOptions)
def memory_command(options: MemoryOptions) -> None:
    if options.on is not None and options.recipe is None:
        raise NapkinError("--on is the device of a plan: name its --recipe")
    if options.page is not None:
        refuse_existing(Path(options.page), option="--page")
    from napkin.profiling import snapshot_view

    view = snapshot_view.view_snapshot(options.file, options.device)
    table = None
    if options.recipe is not None:
        from napkin.planning.planner import plan
        from napkin.recipe.toml_file import read_recipe

        with progress_line("planning") as line:
            planned = plan(read_recipe(options.recipe), options.on, progress=line.retitle).table()
        table = snapshot_view.beside_plan(view, next(row for row in planned if row.quantity == "peak bytes"))
    if options.json:
        print_json(snapshot_view.as_values(view, table))
    else:
        print_table(snapshot_view.HEADINGS, snapshot_view.place_rows(view, MOST_ROWS))
        say()
        for sentence in snapshot_view.snapshot_lines(view):
            say(sentence)
        if table is not None:
            from napkin.report.headline import reconcile_table

            say()
            print_rich(reconcile_table(table))
    if options.page is not None:
        with folder_for(Path(options.page)):
            snapshot_view.write_snapshot_page(view, options.page, title=Path(options.file).name, table=table)
        notify(f"wrote {options.page}")
