"""`napkin runs` and `napkin report`: what runs have left, in the terminal and as pages."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from napkin.cli.common.options import JsonOption, RunOptions, command
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.report.comparison import ComparedRun


@dataclass(frozen=True)
class RunsOptions(JsonOption):
    """List runs and, if there are two or more, compare their losses at equal points."""

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER ...]")] = ()
    """Run folders, or folders that contain some; none is runs/."""
    over: Literal["steps", "tokens", "flops", "seconds", "dollars"] = "tokens"
    """The horizontal axis of the comparison."""
    loss: Literal["training", "validation"] | None = None
    """Which loss is compared at equal points; None is validation where two runs or more have it. The training loss is
    a mean of neighbouring logged steps, as in the report."""
    points: int = 8
    """Approximate number of points of comparison; the end of each run is an additional one."""
    usd_per_hour: float | None = None
    """Price of the machine; None is the price in each plan."""
    page: str | None = None
    """HTML file to write: runs by validation loss, charts over the axis that its reader chooses, what differs between
    the recipes; an earlier page of this command is replaced, no other file is."""


@command("runs", RunsOptions)
def runs_command(options: RunsOptions) -> None:
    if not 1 <= options.points <= 1000:
        raise NapkinError(f"--points is {options.points}: use 1 to 1000")
    if options.usd_per_hour is not None and not 0 < options.usd_per_hour < float("inf"):
        raise NapkinError(f"--usd-per-hour is {options.usd_per_hour}: use a number above 0")
    if not options.folders and not Path("runs").is_dir():
        raise NapkinError("there is no folder 'runs' here: name folders that `napkin train` made")
    from napkin.report.comparison import equal_points, find_runs, point_rows, rank, summary_rows, write_comparison

    runs, over = _read(find_runs(options.folders or ("runs",)), options), options.over
    compared = [run for run in runs if run.summary.step]
    validated = sum(run.summary.validation_loss is not None for run in compared)
    loss = options.loss or ("validation" if validated > 1 else "training")
    points = equal_points(compared, over, options.points) if len(compared) > 1 or options.page else []
    for run in runs:
        for problem in run.problems:
            notify(problem)
    if options.page is not None:
        write_comparison(Path(options.page), compared, loss=loss, axis=over, points=points)
    if options.json:
        losses = {str(run.summary.folder): [run.loss_at(over, point, loss) for point in points] for run in compared}
        shown = {"over": over, "loss": loss, "points": points, "losses": losses}
        print_json({"runs": [asdict(run.summary) for run in runs], **shown})
        return
    rows = summary_rows(runs)
    print_table(list(rows[0]), [list(row.values()) for row in rows], align="ll" + "r" * (len(rows[0]) - 2))
    if len(compared) > 1:
        for statement in rank(compared).statements:
            say()
            say(statement)
        say()
        say(f"{loss} loss, nats per token, at equal {over}:")
        head = [over, *(run.summary.name for run in compared)]
        print_table(head, point_rows(compared, over, points, loss), align="r" * len(head))
    if options.page is not None:
        say(f"wrote {options.page}")


def _read(folders: list[Path], options: RunsOptions) -> "list[ComparedRun]":
    from napkin.report.comparison import read_run
    from napkin.runs.run_folder import is_being_trained

    found = []
    for folder in folders:
        try:
            found.append(read_run(folder, training=bool(is_being_trained(folder)), usd_per_hour=options.usd_per_hour))
        except NapkinError as error:
            if len(folders) == 1:
                raise
            notify(f"left out: {error}")
    names = [run.summary.name for run in found]
    for run in found:
        if names.count(run.summary.name) > 1:
            run.summary = replace(run.summary, name=str(run.summary.folder))
    return found


@dataclass(frozen=True)
class ReportOptions(RunOptions):
    """Write a run's report.html from what its folder holds; also while the run trains."""


@command("report", ReportOptions)
def report_command(options: ReportOptions) -> None:
    from napkin.report.page import MAX_TIME_FRACTION, REFRESH_SECONDS, write_report
    from napkin.runs.metrics import METRICS_FILE, read_metrics_record
    from napkin.runs.run_folder import RunFolder, is_being_trained

    run = RunFolder.open(options.run).path
    begin = time.perf_counter()

    def next_page() -> float:
        # The training process writes the next page no sooner than its share of the time allows.
        return max(REFRESH_SECONDS, (time.perf_counter() - begin) / MAX_TIME_FRACTION)

    report = write_report(run, training=is_being_trained(run), every=next_page)
    for problem in read_metrics_record(run / METRICS_FILE).messages():
        notify(problem)
    if options.json:
        print_json({"run": options.run, "report": report})
    else:
        say(f"wrote {report}", wrap=False)
