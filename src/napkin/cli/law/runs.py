"""The runs that a law is fitted to: a CSV file, run folders, or the example."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from napkin.cli.common.terminal import notify
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.scaling.observations import Observation

LawName = Literal["chinchilla", "gadre", "kaplan", "kaplan-n", "kaplan-d", "kaplan-c"]

FittedName = Literal["chinchilla", "gadre", "kaplan", "kaplan-n", "kaplan-d", "kaplan-c", "data-constrained"]

Sources = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CSV|RUN ...")]


@dataclass(frozen=True)
class ChosenRuns:
    """The runs that a law is fitted to, and those that were left out on request."""

    runs: "list[Observation]"
    dropped: "list[Observation]"
    diverged: tuple[str, ...]
    notes: tuple[str, ...]
    name: str


def read_runs(sources: Sequence[str], *, loss_column: str | None, drop_highest: int) -> ChosenRuns:
    """Read a CSV file, run folders or, as "example", Chinchilla's runs; what is left out is told."""
    from napkin.scaling.observations import EXAMPLE, read_observations, read_run_observations
    from napkin.scaling.observations import drop_highest as without_highest

    if not sources:
        raise NapkinError("no runs are given: name a CSV file, folders of runs, or `example` for Chinchilla's runs")
    if drop_highest < 0:
        raise NapkinError(f"--drop-highest is {drop_highest}: use 0 or more")
    example = list(sources) == ["example"] and not Path("example").exists()
    if example or (len(sources) == 1 and not Path(sources[0]).is_dir()):
        found = read_observations(EXAMPLE if example else sources[0], loss=loss_column)
    else:
        files = [each for each in sources if not Path(each).is_dir()]
        if files:
            raise NapkinError(f"'{files[0]}' is not a folder: name one CSV file alone, or folders of runs")
        if loss_column is not None:
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
