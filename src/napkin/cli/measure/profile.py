"""`napkin profile`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, parse_with_recipe
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_seconds

if TYPE_CHECKING:
    from napkin.profiling.step_profile import StepProfile

MOST_ROWS = 25


@dataclass(frozen=True)
class ProfileOptions(RecipeOptions, JsonOption):
    """Run a few training steps of a recipe, or of a run's recipe, under torch's profiler, and print where their seconds
    go beside what was planned: new weights, random tokens, no text needed. In place of the file, the folder of a run
    can be given. Under torchrun each rank profiles its own step, and rank 0 prints."""

    by: Literal["operator", "module", "phase"] = "operator"
    """What the rows are summed by; of module, layers that are alike are one row."""
    steps: int = 5
    """Steps that are profiled, each beside one that is timed without the profiler."""
    page: str | None = None
    """HTML file to write: all tables, the roofline, memory over the step, and a flame view by module."""
    trace: str | None = None
    """JSON file to write: the calls of one step for https://ui.perfetto.dev or chrome://tracing."""


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
            found = profile_recipe(options.recipe, steps=options.steps, ranks=ranks, progress=line.retitle, title=title)
        if ranks.is_rank_zero:
            _show(options, found)
            from napkin.profiling.profile_page import write_profile_page
            from napkin.profiling.profile_table import write_trace

            for path, write in ((options.page, write_profile_page), (options.trace, write_trace)):
                if path is not None:
                    with folder_for(Path(path)):
                        write(found, path)
                    notify(f"wrote {path}")


def _with_recipe_of_run(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments with the recipe of a run in place of its folder."""
    if not arguments or arguments[0].startswith("-") or not Path(arguments[0]).is_dir():
        return arguments
    from napkin.runs.run_folder import RunFolder

    return [str(RunFolder.open(arguments[0]).path / "recipe.toml"), *arguments[1:]]


def _refuse_existing(options: ProfileOptions) -> None:
    if options.page is not None and options.page == options.trace:
        raise NapkinError(f"--page and --trace are both '{options.page}': name two files")
    for name in ("page", "trace"):
        path = getattr(options, name)
        if path is not None:
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
