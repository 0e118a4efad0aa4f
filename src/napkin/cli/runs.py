"""`napkin runs`."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.table import Table

from napkin.cli.options import Switch, parse
from napkin.cli.terminal import err, out, print_json, say
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.report.comparison import ComparedRun


@dataclass(frozen=True)
class RunsOptions:
    """List runs and, where they are two or more, compare their losses at equal points."""

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER ...]")] = ()
    """Folders of runs, or folders that hold some; none is runs/."""
    over: Literal["steps", "tokens", "flops", "seconds", "dollars"] = "tokens"
    """What they are compared over."""
    loss: Literal["training", "validation"] = "training"
    """Which loss is compared: the training loss is a mean of neighbouring logged steps, as in the report."""
    points: int = 8
    """Points of comparison, about; the end of each run is one more."""
    usd_per_hour: float | None = None
    """Price of the machine; None is what the plans know."""
    page: str | None = None
    """Page to write, an HTML file with charts over all axes; one that exists is replaced."""
    json: Switch = False
    """Print the result for programs."""


def main(arguments: list[str]) -> None:
    """Print the list, and the comparison."""
    options = parse(RunsOptions, "runs", arguments)
    if not 1 <= options.points <= 1000:
        raise NapkinError(f"--points is {options.points}: use 1 to 1000")
    if options.usd_per_hour is not None and not 0 < options.usd_per_hour < float("inf"):
        raise NapkinError(f"--usd-per-hour is {options.usd_per_hour}: use a number above 0")
    if not options.folders and not Path("runs").is_dir():
        raise NapkinError("there is no folder 'runs' here: name folders that `napkin train` made")
    from napkin.report.comparison import equal_points, find_runs

    runs = _read(find_runs(options.folders or ("runs",)), options)
    compared = [run for run in runs if run.summary.step]
    points = equal_points(compared, options.over, options.points) if len(compared) > 1 or options.page else []
    if options.page is not None:
        from napkin.report.comparison_page import write_comparison

        write_comparison(Path(options.page), compared, loss=options.loss, axis=options.over, points=points)
    if options.json:
        _print_json(runs, compared, points, options)
        return
    _print_list(runs)
    if len(compared) > 1:
        _print_points(compared, points, options)
    if options.page is not None:
        say(f"wrote {options.page}")


def _read(folders: list[Path], options: RunsOptions) -> "list[ComparedRun]":
    from napkin.report.comparison import read_run
    from napkin.runs.lock import is_being_trained

    found = []
    for folder in folders:
        try:
            found.append(read_run(folder, training=bool(is_being_trained(folder)), usd_per_hour=options.usd_per_hour))
        except NapkinError as error:
            if len(folders) == 1:
                raise
            err.print(f"left out: {error}", soft_wrap=True)
    names = [run.summary.name for run in found]
    for run in found:
        if names.count(run.summary.name) > 1:
            run.summary = replace(run.summary, name=str(run.summary.folder))
    return found


def _print_list(runs: "list[ComparedRun]") -> None:
    from napkin.report.comparison_page import summary_rows

    rows = summary_rows(runs)
    _print_table([list(rows[0]), *(list(row.values()) for row in rows)], left=2)


def _print_points(compared: "list[ComparedRun]", points: list[float], options: RunsOptions) -> None:
    from napkin.report.comparison_page import point_rows

    say(f"\n{options.loss} loss, nats per token, at equal {options.over}:")
    head = [options.over, *(run.summary.name for run in compared)]
    _print_table([head, *point_rows(compared, options.over, points, options.loss)], left=0)


def _print_table(rows: list[list[str]], *, left: int) -> None:
    table = Table(*rows[0], box=None, header_style="bold", pad_edge=False)
    for column in table.columns[left:]:
        column.justify = "right"
    for column, cells in zip(table.columns, zip(*rows, strict=True), strict=True):
        # Where a terminal is narrow, a cell is broken between its words, and no word is cut.
        column.min_width = max(len(word) for cell in cells for word in cell.split())
    for row in rows[1:]:
        table.add_row(*row)
    out.print(table, crop=False)


def _print_json(
    runs: "list[ComparedRun]", compared: "list[ComparedRun]", points: list[float], options: RunsOptions
) -> None:
    print_json(
        {
            "runs": [asdict(run.summary) for run in runs],
            "over": options.over,
            "loss": options.loss,
            "points": points,
            "losses": {
                str(run.summary.folder): [run.loss_at(options.over, point, options.loss) for point in points]
                for run in compared
            },
        }
    )
