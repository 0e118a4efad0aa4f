"""One run of a sweep: started, resumed, or found finished; in this process or in a worker's."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from napkin.errors import NapkinError
from napkin.planning.planner import Planner
from napkin.recipe.recipe import Recipe
from napkin.report.page import write_report
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_format import is_run
from napkin.training.finished import finished_checkpoint
from napkin.training.run import train_run
from napkin.training.start import create_run, open_run

_STEP_PARTS = ("data", "forward", "backward", "optimizer", "evaluation")


@dataclass(frozen=True)
class Ended:
    """How a run of a sweep ended."""

    state: Literal["finished", "skipped", "failed", "stopped"]
    """Skipped is one that was finished before, stopped one that a signal has interrupted."""
    message: str = ""
    """Why it failed."""
    signal: int = 0
    """That stopped it."""
    seconds: float = 0.0
    """In all."""
    step_seconds: float = 0.0
    """Of its steps and evaluations."""
    notes: tuple[str, ...] = ()
    """What there was to say while it trained."""


def train_one(
    recipe: Recipe,
    folder: Path,
    planner: Planner,
    *,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
) -> Ended:
    """Train a run to its end, from its newest checkpoint if it has one, and write its report."""
    begin, notes = time.perf_counter(), list[str]()
    try:
        if is_run(folder) and finished_checkpoint(folder):
            return Ended("skipped")
        if is_run(folder):
            preparation, run = open_run(folder, data=recipe.data, planner=planner)
        else:
            preparation, run = create_run(recipe, folder, planner=planner)
        outcome = train_run(preparation, run, on_step=on_step, on_message=notes.append)
        write_report(run.path, training=False)
    except NapkinError as error:
        return Ended("failed", str(error), seconds=time.perf_counter() - begin, notes=tuple(notes))
    parts = {} if outcome.measurement is None else outcome.measurement.seconds_by_part
    return Ended(
        "finished" if outcome.interrupted_by is None else "stopped",
        signal=int(outcome.interrupted_by or 0),
        seconds=time.perf_counter() - begin,
        step_seconds=sum(parts.get(part, 0.0) for part in _STEP_PARTS),
        notes=tuple(notes),
    )
