"""A sweep: its runs are planned together, trained one after the other or side by side, and resumed as they are."""

import dataclasses
import signal as signals
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.planning.shared_plans import SharedPlans
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_format import is_run
from napkin.scaling.best_run import Standing, standing
from napkin.scaling.sweep_folder import SweepFile, SweepFolder
from napkin.scaling.sweep_plan import SweepPlan, plan_sweep, refuse_too_small_disk_for_all, with_threads
from napkin.scaling.sweep_run import Ended, train_one
from napkin.scaling.sweep_workers import train_side_by_side
from napkin.scaling.trials import Trial
from napkin.training.finished import finished_checkpoint

Progress = Callable[[str], None]
OnStep = Callable[[Trial, StepMetrics], None]
OnEnd = Callable[[Trial, Ended], None]


class Sweep:
    """Runs in one folder, planned; `run` trains them."""

    def __init__(
        self,
        trials: tuple[Trial, ...],
        folder: SweepFolder,
        file: SweepFile,
        unfinished: tuple[Trial, ...],
        planned: SweepPlan,
        planner: SharedPlans,
    ) -> None:
        self.trials, self.folder, self.file = trials, folder, file
        self.unfinished = unfinished
        """The runs that are trained: neither finished nor failed before."""
        self.planned = planned
        """Of these."""
        self._planner = planner

    @classmethod
    def plan(
        cls,
        trials: tuple[Trial, ...],
        folder: StrPath,
        *,
        at_once: int | None = None,
        retry: bool = False,
        besides: Sequence[str] = (),
        progress: Progress = lambda doing: None,
    ) -> "Sweep":
        """Plan what is left to do of a sweep, without training anything or writing to its folder.

        `besides` are files that may be in the folder before the sweep. Raises NapkinError where it holds something
        else, and where a run, or as many as `at_once`, do not fit.
        """
        trials = tuple(
            dataclasses.replace(trial, recipe=with_threads(trial.recipe, at_once and min(at_once, len(trials))))
            for trial in trials
        )
        place = SweepFolder(Path(folder))
        file = place.open(trials, besides)
        if retry:
            file = dataclasses.replace(file, failed={})
        unfinished = tuple(
            trial for trial in trials if trial.name not in file.failed and not _is_finished(place.run(trial))
        )
        planner = SharedPlans()
        planned = plan_sweep(unfinished, planner, at_once=at_once, progress=progress)
        refuse_too_small_disk_for_all(planned, place.path)
        return cls(trials, place, file, unfinished, planned, planner)

    def run(
        self,
        *,
        on_step: OnStep = lambda trial, metrics: None,
        on_end: OnEnd = lambda trial, ended: None,
    ) -> signals.Signals | None:
        """Train the runs that are left; one that fails is recorded, and the others go on.

        `on_step` is called where runs train in this process, one at a time; `on_end` at the end of each. Returns the
        signal that has stopped the sweep, or None.
        """
        self.file = self.folder.write(self.file, self.trials)

        def ended(trial: Trial, how: Ended) -> None:
            self.file = self.folder.write_failure(self.file, trial.name, how.message if how.state == "failed" else None)
            on_end(trial, how)

        if self.planned.at_once > 1:
            if threading.current_thread() is not threading.main_thread():
                raise NapkinError("runs side by side are started from the main thread: use at_once=1 in others")
            stopped = train_side_by_side(self.unfinished, self.folder.run, self.planned.at_once, ended)
            return signals.Signals(stopped) if stopped else None
        for trial in self.unfinished:
            how = train_one(
                trial.recipe,
                self.folder.run(trial),
                self._planner,
                on_step=lambda metrics, trial=trial: on_step(trial, metrics),
            )
            ended(trial, how)
            if how.state == "stopped":
                return signals.Signals(how.signal)
        return None

    def standings(self) -> list[Standing]:
        """The figures of every run, in the order of the sweep."""
        return [standing(trial, self.folder.run(trial)) for trial in self.trials]


def _is_finished(run: Path) -> bool:
    return is_run(run) and finished_checkpoint(run) is not None
