"""What the commands on laws share: the runs that a law is fitted to, and a table of optima."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from napkin.cli.common.options import JsonOption
from napkin.cli.common.terminal import notify, print_table
from napkin.errors import NapkinError
from napkin.units import format_count

if TYPE_CHECKING:
    from napkin.scaling.fitted_law import Interval, Optimum
    from napkin.scaling.observations import Observation

LawName = Literal["chinchilla", "gadre", "kaplan", "kaplan-n", "kaplan-d", "kaplan-c"]

Sources = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CSV|RUN ...")]


@dataclass(frozen=True)
class RunsOptions(JsonOption):
    """For commands that read finished runs."""

    runs: Sources = ()
    """A CSV file with columns for parameters, tokens (or FLOPs) and loss, folders of runs, or `example`: Chinchilla's
    runs. Runs whose loss is not a finite number are left out."""
    drop_highest: int = 0
    """Leave out so many runs of highest loss."""
    loss_column: str | None = None
    """Column of the loss in the CSV file; None is the one called loss, or the only one with it in its name."""


@dataclass(frozen=True)
class ChosenRuns:
    """The runs that a law is fitted to, and those that were left out on request."""

    runs: "list[Observation]"
    dropped: "list[Observation]"
    diverged: tuple[str, ...]
    notes: tuple[str, ...]
    name: str


def read_runs(options: RunsOptions) -> ChosenRuns:
    """Read a CSV file, run folders or, as "example", Chinchilla's runs; what is left out is told."""
    from napkin.scaling.observations import EXAMPLE, read_observations, read_run_observations
    from napkin.scaling.observations import drop_highest as without_highest

    sources, drop_highest = options.runs, options.drop_highest
    if not sources:
        raise NapkinError("no runs are given: name a CSV file, folders of runs, or `example` for Chinchilla's runs")
    if drop_highest < 0:
        raise NapkinError(f"--drop-highest is {drop_highest}: use 0 or more")
    example = list(sources) == ["example"] and not Path("example").exists()
    if example or (len(sources) == 1 and not Path(sources[0]).is_dir()):
        found = read_observations(EXAMPLE if example else sources[0], loss=options.loss_column)
    else:
        files = [each for each in sources if not Path(each).is_dir()]
        if files:
            raise NapkinError(f"'{files[0]}' is not a folder: name one CSV file alone, or folders of runs")
        if options.loss_column is not None:
            raise NapkinError("--loss-column is for CSV files: leave it out for runs")
        found = read_run_observations(sources)
    if drop_highest >= len(found.runs):
        raise NapkinError(f"--drop-highest is {drop_highest}, there are {len(found.runs)} runs: leave some")
    kept, dropped = without_highest(found.runs, drop_highest)
    for note in found.notes:
        notify(f"note: {note}")
    if found.diverged:
        shown = ", ".join(found.diverged[:5]) + (" ..." if len(found.diverged) > 5 else "")
        notify(f"note: {len(found.diverged)} left out, as the loss is not a finite number: {shown}")
    return ChosenRuns(kept, dropped, found.diverged, found.notes, "example" if example else ", ".join(sources))


def print_optima(optima: "Sequence[Optimum]", largest: float) -> None:
    """A row per budget."""
    print_table(
        ["FLOPs", "× largest run", "parameters", "90%", "tokens", "90%", "loss", "90%"],
        [
            [
                f"{each.flops:.3g}",
                f"{each.flops / largest:.3g}",
                format_count(each.parameters.estimate),
                span(each.parameters),
                format_count(each.tokens.estimate),
                span(each.tokens),
                f"{each.loss.estimate:.4f}",
                f"{each.loss.low:.4f} to {each.loss.high:.4f}",
            ]
            for each in optima
        ],
        align="rrrlrlrl",
    )


def span(interval: "Interval") -> str:
    """An interval of counts."""
    return f"{format_count(interval.low)} to {format_count(interval.high)}"
