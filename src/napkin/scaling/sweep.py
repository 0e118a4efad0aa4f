"""A sweep: its runs are planned together, trained one after the other or side by side, and resumed as they are.

Its folder has sweep.json, which says which runs they are and which have failed. Its cost is known before it starts:
seconds, dollars and bytes of all runs, and how many of them run at once. At its end it says which run is best, which
are next to it, and whether it lies at the edge of what was tried.
"""

import dataclasses
import os
import shlex
import signal as signals
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from napkin.checkpoint.folder import kept_checkpoints
from napkin.distributed.ranks import ALONE
from napkin.errors import NapkinError
from napkin.files import StrPath, free_disk_bytes
from napkin.hardware.host import detect_host
from napkin.json_files import read_json, write_json
from napkin.planning.planner import SharedPlans
from napkin.planning.step.plan_file import whole_checkpoint_bytes
from napkin.planning.step.run_plan import Plan
from napkin.recipe.precision import choose_device
from napkin.recipe.recipe import Recipe
from napkin.report.comparison import read_run
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import is_run, runs_in
from napkin.scaling.sweep_workers import Ended, train_one, train_side_by_side
from napkin.scaling.trials import Trial, Value
from napkin.training.callbacks import finished_checkpoint
from napkin.training.method import Setting
from napkin.training.run import prepare, recipe_differences
from napkin.units import format_bytes

SWEEP_FILE = "sweep.json"
FORMAT, VERSION = "napkin-sweep", 1


@dataclass(frozen=True)
class SweepFile:
    """The content of sweep.json."""

    format: str = FORMAT
    version: int = VERSION
    runs: dict[str, dict[str, Value]] = field(default_factory=dict)
    """The values of each run's axes, by the name of its folder."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why runs have failed."""


@dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep."""

    path: Path

    def run(self, trial: Trial) -> Path:
        return self.path / trial.name

    def open(self, trials: tuple[Trial, ...], besides: Sequence[str] = ()) -> SweepFile:
        """Read what the folder holds of this sweep; nothing is written.

        A sweep may have runs that an earlier one in this folder did not have, but not the other way round. Raises
        NapkinError where the folder holds anything else, or a run of another recipe.
        """
        if not os.path.lexists(self.path):
            return SweepFile()
        if not self.path.is_dir():
            raise NapkinError(f"'{self.path}' exists and is not a folder: choose another --runs")
        file = read_json(self.path / SWEEP_FILE, SweepFile)
        if file is None:
            if {path.name for path in self.path.iterdir()} - set(besides):
                what = "is a run" if is_run(self.path) else "holds runs" if runs_in(self.path) else "is not empty"
                raise NapkinError(f"'{self.path}' {what} and is not of a sweep: choose another --runs")
            return SweepFile()
        if file.format != FORMAT or not 0 < file.version <= VERSION:
            raise NapkinError(
                f"'{self.path / SWEEP_FILE}' has format {file.format[:40]!r}, version {file.version}, this napkin "
                f"reads versions up to {VERSION}: use the napkin that made it"
            )
        names = {trial.name for trial in trials}
        missing = [name for name in file.runs if name not in names]
        if missing:
            raise NapkinError(
                f"'{self.path}' holds another sweep, of {len(file.runs)} runs: {missing[0]} is not in this one: "
                "name all of its values and new ones, or choose another --runs"
            )
        for trial in trials:
            if is_run(self.run(trial)) and (differences := recipe_differences(trial.recipe, self.run(trial))):
                raise NapkinError(
                    f"'{self.run(trial)}' is a run of another recipe: there {'; '.join(differences)}: choose another "
                    "--runs"
                )
        return file

    def write(self, found: SweepFile, trials: tuple[Trial, ...]) -> SweepFile:
        """Make the folder, and write which runs it is for."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = dataclasses.replace(found, runs={trial.name: trial.values for trial in trials})
        write_json(self.path / SWEEP_FILE, file)
        return file

    def write_failure(self, file: SweepFile, name: str, why: str | None) -> SweepFile:
        """Write that a run has failed, and why; None is that it has not."""
        failed = {each: text for each, text in file.failed.items() if each != name}
        changed = dataclasses.replace(file, failed=failed if why is None else {**failed, name: why})
        if changed != file:
            write_json(self.path / SWEEP_FILE, changed)
        return changed

    def __str__(self) -> str:
        return shlex.quote(str(self.path))


SECONDS_PER_RUN = 1.0
"""Seconds of a run beside its steps: its files are opened, a step is metered, a checkpoint and a report are written.
Measured: see docs/scaling.md."""
FORWARD_SHARE = 1 / 3
"""The forward pass's part of a step's FLOPs: the backward pass has twice as many."""


@dataclass(frozen=True)
class SweepPlan:
    """The plans of the runs of a sweep."""

    plans: dict[str, Plan]
    """Plans by the name of the run."""
    at_once: int
    """Runs that train side by side."""
    n_counted: int
    """The number of different steps that were counted and timed."""

    @property
    def seconds(self) -> float:
        """Seconds of all runs, side by side, with evaluations and what a run takes beside its steps."""
        return sum(map(run_seconds, self.plans.values())) / self.at_once

    @property
    def dollars(self) -> float | None:
        """Price of these seconds; None where it is not known."""
        price = next((plan.site.usd_per_hour for plan in self.plans.values()), None)
        return None if price is None else self.seconds / 3600 * price

    @property
    def flops(self) -> int:
        """Counted FLOPs of all steps of all runs."""
        return sum(plan.steps * plan.ledger.flops for plan in self.plans.values())

    @property
    def peak_bytes(self) -> int:
        """Tensors of the largest runs that may train side by side."""
        return sum(sorted((plan.peak_bytes for plan in self.plans.values()), reverse=True)[: self.at_once])

    @property
    def disk_bytes(self) -> int:
        """Checkpoints that all runs keep."""
        total = 0
        for plan in self.plans.values():
            training = plan.recipe.training
            written = -(-training.steps // training.checkpoint_every) + training.keep_best
            total += whole_checkpoint_bytes(plan) * min(kept_checkpoints(training), written)
        return total

    def as_values(self) -> dict[str, Any]:
        """The plan for programs: each run, and what they take in all."""
        runs = {
            name: {
                "parameters": plan.ledger.parameters,
                "tokens": plan.steps * plan.tokens_per_step,
                "flops": plan.steps * plan.ledger.flops,
                "peak_bytes": plan.peak_bytes,
                "seconds": run_seconds(plan),
            }
            for name, plan in self.plans.items()
        }
        names = ("at_once", "seconds", "dollars", "flops", "peak_bytes", "disk_bytes")
        return {"runs": runs} | {name: getattr(self, name) for name in names}


def run_seconds(plan: Plan) -> float:
    """Seconds of a run: steps, evaluations by the rule that a forward pass is a third of a step, and the rest."""
    training, recipe = plan.recipe.training, plan.recipe
    n_evaluations = 0 if recipe.data.validation is None else -(-training.steps // training.evaluate_every)
    per_evaluation = FORWARD_SHARE * plan.seconds_per_step * training.evaluation_tokens / plan.tokens_per_step
    return plan.seconds + n_evaluations * per_evaluation + SECONDS_PER_RUN


@dataclass(frozen=True)
class Standing:
    """A run with its figures at its end."""

    trial: Trial
    folder: Path
    loss: float | None
    """Nats per token: of the validation tokens, or without them of the last training steps; None where the run is not
    at its end."""
    step: int
    tokens: int
    seconds: float
    flops: float | None
    """Counted, of all its steps."""

    def as_values(self) -> dict[str, Any]:
        names = ("folder", "loss", "step", "tokens", "seconds", "flops")
        return {"run": self.trial.name, "values": self.trial.values} | {name: getattr(self, name) for name in names}


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
        """The plans of these runs."""
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
        """Plan the unfinished runs of a sweep on this machine, without training anything or writing to its folder.

        `at_once` is how many runs train side by side; None is as many as have cores and memory if the recipe says how
        many threads each has, else one. `besides` are files that may be in the folder before the sweep. Raises
        NapkinError where it holds something else, and where a run, as many as `at_once`, or the checkpoints of all do
        not fit.
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
            trial
            for trial in trials
            if trial.name not in file.failed
            and not (is_run(place.run(trial)) and finished_checkpoint(place.run(trial)) is not None)
        )
        planner, plans = SharedPlans(), dict[str, Plan]()
        for number, trial in enumerate(unfinished, start=1):
            progress(f"planning run {number} of {len(unfinished)}")
            try:
                plan = prepare(trial.recipe, setting=Setting(planner=planner)).plan
            except NapkinError as error:
                raise NapkinError(f"the run {trial.name}: {error}") from None
            assert plan is not None
            plans[trial.name] = plan
        planned = SweepPlan(plans, _side_by_side(list(plans.values()), at_once), planner.n_counted)
        free = free_disk_bytes(place.path)
        if free < planned.disk_bytes:
            raise NapkinError(
                f"the checkpoints of {len(plans)} runs take {format_bytes(planned.disk_bytes)}, the disk of "
                f"'{place.path}' has {format_bytes(free)} free: choose a --runs on another disk, or "
                "--training.keep-checkpoints 1 with --training.keep-best false"
            )
        return cls(trials, place, file, unfinished, planned, planner)

    def run(
        self, *, on_step: OnStep = lambda trial, metrics: None, on_end: OnEnd = lambda trial, ended: None
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

    def as_values(self) -> dict[str, Any]:
        """The outcome for programs: every run, the best one, its neighbours, and edges of the values at which it is."""
        standings = self.standings()
        order = ranked(standings)
        best = order[0].trial if order else None
        return {
            "folder": self.folder.path,
            "runs": [each.as_values() for each in standings],
            "failed": self.file.failed,
            "best": None if best is None else best.name,
            "neighbours": [] if best is None else [each.name for each in neighbours(best, self.trials)],
            "edges": [] if best is None else [vars(edge) for edge in edges(best, self.trials)],
        }


def with_threads(recipe: Recipe, at_once: int | None) -> Recipe:
    """The recipe with the threads of one of `at_once` runs, where it leaves them open.

    Raises NapkinError where there are fewer cores than runs, and for runs side by side on one GPU.
    """
    if at_once is None or at_once == 1:
        return recipe
    if at_once < 1:
        raise NapkinError(f"--at-once is {at_once}: use 1 or more")
    if choose_device(recipe.training.device) == "cuda":
        raise NapkinError(f"--at-once is {at_once}, but runs on a GPU train one after the other: leave it out")
    cores = detect_host().cores
    threads = recipe.training.threads or cores // at_once
    if not threads or threads * at_once > cores:
        each = f" of {threads} threads" if threads > 1 else ""
        raise NapkinError(f"--at-once is {at_once}, but {at_once} runs{each} do not fit on {cores} cores: use fewer")
    training = dataclasses.replace(recipe.training, threads=threads)
    return dataclasses.replace(recipe, training=training)


def _side_by_side(plans: list[Plan], at_once: int | None) -> int:
    """The number of runs that train side by side: as wanted, or as many as there are cores and memory for."""
    if not plans:
        return 1
    peaks = sorted((plan.peak_bytes for plan in plans), reverse=True)
    threads = [plan.recipe.training.threads or 1 for plan in plans]
    site = plans[0].site
    # A separate process has its own copy of the libraries.
    libraries = psutil.Process().memory_info().rss
    by_memory = next(
        (n for n in range(len(plans), 1, -1) if sum(peaks[:n]) + n * libraries <= site.memory_bytes + libraries), 1
    )
    if at_once is None:
        chosen = all(plan.resolved.precision.device_type == "cpu" for plan in plans)
        at_once = detect_host().cores // max(threads) if chosen and ALONE.world_size == 1 else 1
        return max(1, min(at_once, by_memory, len(plans)))
    at_once = min(at_once, len(plans))
    if at_once > by_memory:
        needed = sum(peaks[:at_once]) + at_once * libraries
        raise NapkinError(
            f"--at-once is {at_once}, but {at_once} runs side by side take {format_bytes(needed)}, this machine has "
            f"{format_bytes(site.memory_bytes)} free: use --at-once {by_memory}"
        )
    return at_once


@dataclass(frozen=True)
class Edge:
    """An axis whose best value is the smallest or the largest that was tried."""

    field: str
    value: Value
    is_smallest: bool

    def __str__(self) -> str:
        kind, other = ("smallest", "smaller") if self.is_smallest else ("largest", "larger")
        return f"the best {self.field}, {self.value}, is the {kind} that was tried: try {other} ones"


def standing(trial: Trial, folder: Path) -> Standing:
    """The figures of a run; a run that has not begun has none."""
    try:
        run = read_run(folder, training=False) if is_run(folder) else None
    except NapkinError:
        # The run is damaged, which training it will report.
        run = None
    if run is None:
        return Standing(trial, folder, None, 0, 0, 0.0, None)
    summary = run.summary
    loss = summary.loss if summary.validation_loss is None else summary.validation_loss
    finished = loss if summary.state == "finished" else None
    return Standing(trial, folder, finished, summary.step, summary.tokens, summary.seconds, summary.flops)


def ranked(standings: Sequence[Standing]) -> list[Standing]:
    """The runs that are at their end, the lowest loss first."""
    return sorted((each for each in standings if each.loss is not None), key=lambda each: each.loss or 0.0)


def edges(best: Trial, trials: Sequence[Trial]) -> list[Edge]:
    """The axes on which `best` is at the edge of all trials, failed ones too; of numbers alone.

    A loss that still falls towards an edge says nothing of where it ends. Seeds have no order.
    """
    edges: list[Edge] = []
    for name, value in best.values.items():
        if name.endswith("_seed"):
            continue
        tried = {trial.values[name] for trial in trials}
        numbers = sorted(each for each in tried if isinstance(each, int | float) and not isinstance(each, bool))
        if len(tried) > 1 and len(numbers) == len(tried) and value in (numbers[0], numbers[-1]):
            edges.append(Edge(name, value, is_smallest=value == numbers[0]))
    return edges


def neighbours(best: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """The runs of a grid that differ from `best` in one axis, by one step; of a list or a sample, none may."""

    def place_of(value: Value) -> tuple[bool, float, str]:
        is_number = isinstance(value, int | float)
        return (not is_number, float(value) if is_number else 0.0, str(value))

    neighbours: list[Trial] = []
    for name, value in best.values.items():
        others = {each: item for each, item in best.values.items() if each != name}
        line = [trial for trial in trials if all(trial.values[each] == item for each, item in others.items())]
        ordered = sorted(line, key=lambda trial, name=name: place_of(trial.values[name]))
        place = next(i for i, trial in enumerate(ordered) if trial.values[name] == value)
        neighbours += [ordered[i] for i in (place - 1, place + 1) if 0 <= i < len(ordered)]
    return neighbours
