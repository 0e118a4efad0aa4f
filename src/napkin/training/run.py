"""Train a run of any kind: the training loop with the step of its method and the standard callbacks."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from napkin.accounting.pricing import Measurement
from napkin.accounting.quantities import QuantityTable
from napkin.distributed.joining import join_ranks
from napkin.files import StrPath
from napkin.planning.step.machine import Progress
from napkin.planning.step.plan_file import plan_file_of
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder
from napkin.train_step.step import TrainState
from napkin.training.callbacks import Checkpointing, MetricsLog, OnStep, Trackers
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.metered_step import Accounting
from napkin.training.method import Method
from napkin.training.signals import catch_interruption
from napkin.training.start import create_or_open_run


@dataclass(frozen=True, repr=False)
class Outcome:
    """The result of training."""

    train_state: TrainState
    step: int
    """Updates done."""
    checkpoint: Path
    interrupted_by: signal.Signals | None
    measurement: Measurement | None
    """The measurement of this process's steps; None where there were too few to meter one and time another."""
    table: QuantityTable
    """Rule, count and meter of every quantity; without a measurement, empty."""
    first_step: int
    """Step of the checkpoint that training continued from; 0 for a new run."""

    def __repr__(self) -> str:
        stopped = "" if self.interrupted_by is None else f", stopped by {self.interrupted_by.name}"
        return f"Outcome(step {self.step:,}{stopped}, '{self.checkpoint}')\n{self.table!r}"


def train(
    recipe: Recipe | StrPath,
    folder: StrPath,
    *,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    on_message: Callable[[str], None] = lambda message: None,
    progress: Progress = lambda doing: None,
) -> Outcome:
    """Plan, train and reconcile a run in `folder`: start it, or resume it if it exists.

    Args:
        recipe: the recipe, or its TOML file.
        folder: a new folder, or that of a run of the same recipe.
        on_step: called with the metrics of each step.
        on_message: called with messages for the user: damaged checkpoints, skipped steps, a nearly full disk.
        progress: called with a description of each stage before the first step.

    Under torchrun each rank calls this. Raises NapkinError where the folder holds anything else than a run of this
    recipe, where files are missing or damaged, and where the step does not fit into the memory.
    """
    recipe = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    with join_ranks(recipe.training) as ranks:
        method, run = create_or_open_run(recipe, folder, progress=progress, on_message=on_message, ranks=ranks)
        return train_run(method, run, on_step=on_step, on_message=on_message)


def train_run(
    method: Method,
    run: RunFolder,
    *,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    on_message: Callable[[str], None] = lambda message: None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train a run to its end, from its newest good checkpoint if it has one, and write its metrics and checkpoints.

    The steps that remain are bit for bit those of a run that was never stopped, on the same machine with the same
    number of threads: weights, moments and step number come from the checkpoint, everything else is a function of the
    step number. Signals that ask it to stop (see `signals.py`) end it after the current step, with a checkpoint; an
    evaluation, or a step of many micro-batches, is interrupted and repeated on resuming. With several ranks all call
    this, interrupt nothing, and stop after the same step; rank 0 writes. `callbacks` are called after the run's own.
    """
    plan = method.plan
    with run.locked(), catch_interruption() as interruption:
        run.remove_leftovers()
        run.upgrade()
        # The process may have been killed between creating the folder and writing the plan.
        if plan is not None and not (run.path / "plan.json").exists():
            run.write_json("plan.json", plan_file_of(plan))
        step = method.step()
        loop = TrainingLoop(method, run, on_message, interruption, step)
        metrics_log = MetricsLog(loop)
        checkpointing = Checkpointing(loop, metrics_log)
        for warning in () if plan is None else plan.warnings:
            on_message(warning)
        accounting = Accounting(step)
        loop.callbacks = [
            method.evaluation(),
            metrics_log,
            accounting,
            checkpointing,
            Trackers(),
            OnStep(on_step),
            *method.callbacks(),
            *callbacks,
        ]
        loop.run_to_end()
        assert checkpointing.last is not None
        accounting.write(loop)
        stopped_by, last = interruption.signal, checkpointing.last.path
        return Outcome(
            loop.train_state, loop.step, last, stopped_by, accounting.measurement, accounting.table, loop.first_step
        )
