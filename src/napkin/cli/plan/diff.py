"""`napkin diff BEFORE AFTER`: what a change of a recipe does to a step, exactly."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from napkin.child_process import run_program
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.cli.plan.recipe import By, Counted
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkin.accounting.comparison import Change, StepDifference, StepFigures
    from napkin.recipe.recipe import Recipe

MOST_PARTS = 20
SHOWN = ("calls", "flops", "bytes_read", "bytes_written", "bytes_kept", "seconds")
GIT_SECONDS = 30.0


@dataclass(frozen=True)
class DiffOptions(JsonOption):
    """Say what changed between two training steps: parameters, FLOPs, bytes, collectives and seconds, by module. Both
    steps are planned for the same devices and nothing runs, so that equal steps have equal figures on every machine.

    A step is a recipe's file (`small.toml`), the file as it was at a commit (`HEAD~1:small.toml`), a run's folder, a
    preset (`gpt2`), or what `napkin count --json` has printed (`before.json`)."""

    steps: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="BEFORE AFTER")] = ()
    """The two steps; with --since, recipes' files, as many as are to be compared."""
    since: str | None = None
    """A commit: each recipe is compared with what it was there."""
    on: str = "H100"
    """Devices of the catalogue that both steps are planned for, as in 8xH100."""
    by: By = "module"
    """Kind of the parts that are compared: component, operator, module or phase."""
    limit: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """How much a figure may grow, as in peak_bytes=2% or flops=0; the exit status is 1 where it grew by more. Can be
    given several times."""


@command("diff", DiffOptions)
def main(options: DiffOptions) -> int:
    from napkin.accounting.comparison import Limit, compare_steps

    limits = {text: Limit.parse(text) for text in options.limit}
    results = {}
    for before, after in _pairs(options):
        difference = compare_steps(_figures(before, options), _figures(after, options))
        exceeded = [text for text, limit in limits.items() if limit.is_exceeded(difference)]
        results[f"{before} {after}"] = {**difference.as_values(), "exceeded": exceeded}
        if not options.json:
            if options.since is not None:
                say(f"{after} since {options.since}:")
            _print(difference)
        for text in exceeded:
            say(f"{after} exceeds the limit {text}")
    if options.json:
        print_json(results if options.since is not None else next(iter(results.values())))
    return 1 if any(result["exceeded"] for result in results.values()) else 0


def _pairs(options: DiffOptions) -> list[tuple[str, str]]:
    """The steps that are compared. A recipe that is new since the commit has nothing to be compared with."""
    steps = options.steps
    if options.since is None:
        if len(steps) != 2:
            example = "`napkin diff HEAD:small.toml small.toml`"
            raise NapkinError(f"{len(steps)} step{'s' * (len(steps) != 1)} to compare: name two, as in {example}")
        return [(steps[0], steps[1])]
    if not steps:
        raise NapkinError(f"there is nothing to compare with {options.since}: name recipes' files")
    pairs = []
    for step in steps:
        if _is_at_commit(options.since, step):
            pairs.append((f"{options.since}:{step}", step))
        else:
            say(f"{step} is new since {options.since}")
    return pairs


def _figures(step: str, options: DiffOptions) -> "StepFigures":
    from napkin.accounting.comparison import step_figures

    if step.endswith(".json"):
        return _printed(Path(step))
    recipe = _recipe(step)
    with progress_line(f"counting {step}") as line:
        from napkin.planning.planner import plan

        planned = plan(recipe, options.on, progress=lambda doing: line(0, None, doing))
    return step_figures(planned.ledger, by=options.by, price=planned.price)


def _printed(path: Path) -> "StepFigures":
    """The figures that `napkin count --json` has printed."""
    from napkin.accounting.comparison import TOTALS, StepFigures
    from napkin.json_files import malformed, read_if_present, refuse_extremes

    data = read_if_present(path)
    if data is None:
        raise NapkinError(f"there is no file '{path}': make it with `napkin count RECIPE.toml --json > {path}`")
    try:
        printed = msgspec.json.decode(data, type=Counted)
        refuse_extremes(printed)
    except (ValueError, RecursionError) as error:
        raise malformed(path, error) from None
    totals = {name: printed.get(name) for name in TOTALS}
    totals["calls"] = sum(row.get("calls", 0) for row in printed["rows"].values())
    totals["kept_bytes"] = sum(row.get("bytes_kept", 0) for row in printed["rows"].values())
    return StepFigures(totals, printed["peak_by_category"], printed["rows"], by=printed["by"])


def _recipe(step: str) -> "Recipe":
    from napkin.model.config import preset, presets
    from napkin.recipe.recipe import Recipe
    from napkin.recipe.toml_file import read_recipe

    if (Path(step) / "recipe.toml").is_file():
        return read_recipe(Path(step) / "recipe.toml")
    commit, colon, path = step.rpartition(":")
    if colon and not Path(step).exists():
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / Path(path).name
            written.write_bytes(_at_commit(commit, path))
            try:
                return read_recipe(written)
            except NapkinError as error:
                raise NapkinError(str(error).replace(str(written), step)) from None
    if step.lower() in presets() and not Path(step).exists():
        return replace(Recipe(), model=preset(step))
    return read_recipe(step)


def _is_at_commit(commit: str, path: str) -> bool:
    # `git show` of a commit that does not exist says so; a file that did not is no error here.
    return bool(_git(commit, "ls-tree", "--name-only", commit, "--", path).strip())


def _at_commit(commit: str, path: str) -> bytes:
    """A file as it was at a commit of the repository that the current folder is in."""
    return _git(f"{commit}:{path}", "show", f"{commit}:./{path}")


def _git(what: str, verb: str, *arguments: str) -> bytes:
    # A name that a user types must not be taken for an option of git.
    if any(argument.startswith("-") and argument not in ("--", "--name-only") for argument in arguments):
        raise NapkinError(f"'{what}' is not the name of a commit or file: use one that does not begin with '-'")
    try:
        shown = run_program(["git", "-C", str(Path.cwd()), verb, *arguments], most_seconds=GIT_SECONDS)
    except (OSError, ValueError) as error:
        raise NapkinError(f"'{what}' cannot be read, git does not answer: {error}") from None
    if shown.returncode:
        why = shown.stderr.decode(errors="replace").strip().partition("\n")[0].removeprefix("fatal: ")
        raise NapkinError(f"'{what}' cannot be read: {why}")
    return shown.stdout


def _print(difference: "StepDifference") -> None:
    from napkin.accounting.quantities import format_figure

    if difference.equal:
        say("the steps are equal")
        return
    rows = [
        (
            change.name.replace("_", " "),
            format_figure(change.before, change.unit),
            format_figure(change.after, change.unit),
            str(change),
        )
        for change in (*difference.totals, *(replace(each, name=f"peak: {each.name}") for each in difference.peak))
    ]
    print_table(("figure", "before", "after", "difference"), rows)
    if difference.collectives:
        rows = [(name, *_cells(changes, ("calls", "bytes"))) for name, changes in difference.collectives.items()]
        print_table(("collective", "calls", "bytes"), rows)
    parts = list(difference.parts.items())
    if parts:
        rows = [(name or "(outside of modules)", *_cells(changes, SHOWN)) for name, changes in parts[:MOST_PARTS]]
        print_table((difference.after.by, "calls", "FLOPs", "read", "written", "kept", "seconds"), rows)
    if len(parts) > MOST_PARTS:
        say(f"and {len(parts) - MOST_PARTS} others: --json shows all")


def _cells(changes: "Sequence[Change]", names: "Sequence[str]") -> list[str]:
    """The increase of each figure; empty where it is unchanged."""
    added = {change.name: change.added for change in changes}
    return [added.get(name, "") for name in names]
