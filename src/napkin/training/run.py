"""Train a run: the training loop with the step of pre-training and the standard callbacks."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from napkin.accounting.pricing import Measurement
from napkin.accounting.quantities import QuantityTable
from napkin.data.prefetch import Batch
from napkin.distributed.joining import join_ranks
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.planning.step.plan_file import plan_file_of
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder, is_run
from napkin.train_step.step import TrainState, Watch
from napkin.training.callbacks import Checkpointing, Evaluation, MetricsLog, OnStep, Trackers
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.metered_step import Books, IsFit, MeteredStep
from napkin.training.preparation import Preparation, Prepared, Progress
from napkin.training.signals import catch_interruption
from napkin.training.start import create_run, open_run, recipe_differences

# FOLD training/run.py
# The step of pre-training: next-token prediction on a batch of windows.


class WeightedBatch(NamedTuple):
    """A batch, and the weights of its micro-batches; None where all weigh the same."""

    tensors: Batch
    weights: list[float] | None


class PretrainingStep(MeteredStep):
    """Trains on the batch of the loop's next step."""

    def batch(self, loop: TrainingLoop, number: int) -> WeightedBatch:
        """The rows of this rank."""
        loop.reading_batch = True
        with loop.guarded(_preparation(loop).train_tokens):
            batch = loop.fetcher[number]
        loop.reading_batch = False
        weights = loop.train_state.micro_batch_weights(batch[1]) if loop.ranks.world_size > 1 else None
        return WeightedBatch(batch, weights)

    def train(self, loop: TrainingLoop, number: int, batch: WeightedBatch, watch: Watch, is_fit: IsFit) -> Tensor:
        """See `TrainState.step`."""
        loss, _ = loop.train_state.step(number, *batch.tensors, weights=batch.weights, watch=watch, is_fit=is_fit)
        return loss

    def micro_batches(self, loop: TrainingLoop, batch: WeightedBatch) -> int:
        """Of this rank."""
        return len(batch.tensors[0]) // loop.recipe.training.resolved_micro_batch_size

    def tensors(self, batch: WeightedBatch) -> dict[str, Tensor]:
        """All of the batch."""
        return dict(zip(("inputs", "targets", "documents"), batch.tensors, strict=False))

    def tokens(self, loop: TrainingLoop) -> tuple[int, int, float | None]:
        """Every step has as many."""
        each = loop.recipe.tokens_per_step
        return loop.step * each, each, _preparation(loop).train_tokens.epochs(loop.step * each)


def _preparation(loop: TrainingLoop) -> Preparation:
    assert isinstance(loop.preparation, Preparation)
    return loop.preparation


@dataclass(frozen=True, repr=False)
class Outcome:
    """How training ended."""

    train_state: TrainState
    step: int
    """Updates done."""
    checkpoint: Path
    interrupted_by: signal.Signals | None
    measurement: Measurement | None
    """Of this process's steps; None where there were too few to meter one and time another."""
    table: QuantityTable
    """Rule, count and meter of every quantity; without a measurement, empty."""
    first_step: int
    """Step of the checkpoint that training continued from; 0 for a new run."""

    def __repr__(self) -> str:
        stopped = "" if self.interrupted_by is None else f", stopped by {self.interrupted_by.name}"
        return f"Outcome(step {self.step:,}{stopped}, '{self.checkpoint}')\n{self.table!r}"


def train_run(
    preparation: Prepared,
    run: RunFolder,
    *,
    step: MeteredStep | None = None,
    evaluation: Callback | None = None,
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
    `step` and `evaluation` are those of pre-training, if no others are given.
    """
    plan = preparation.plan
    with run.locked(), catch_interruption() as interruption:
        run.remove_leftovers()
        run.upgrade()
        # The process may have been killed between creating the folder and writing the plan.
        if plan is not None and not (run.path / "plan.json").exists():
            run.write_json("plan.json", plan_file_of(plan))
        step = step or PretrainingStep()
        loop = TrainingLoop(preparation, run, on_message, interruption, step)
        metrics_log = MetricsLog(loop)
        checkpointing = Checkpointing(loop, metrics_log)
        for warning in () if plan is None else plan.warnings:
            on_message(warning)
        books = Books(step)
        loop.callbacks = [
            evaluation or Evaluation(),
            metrics_log,
            books,
            checkpointing,
            Trackers(),
            OnStep(on_step),
            *callbacks,
        ]
        loop.run_to_end()
        assert checkpointing.last is not None
        books.write(loop)
        stopped_by, first_step = interruption.signal, loop.first_step
        last = checkpointing.last.path
        return Outcome(loop.train_state, loop.step, last, stopped_by, books.measurement, books.table, first_step)


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
        exists = ranks.broadcast_from_zero(lambda: _refuse_other_recipe(recipe, Path(folder)))
        if exists:
            preparation, run = open_run(folder, data=recipe.data, progress=progress, ranks=ranks)
        else:
            preparation, run = create_run(recipe, folder, progress=progress, ranks=ranks)
        return train_run(preparation, run, on_step=on_step, on_message=on_message)


def _refuse_other_recipe(recipe: Recipe, folder: Path) -> bool:
    """Whether the folder is a run. Raises NapkinError where its recipe is another one."""
    if not is_run(folder):
        return False
    differences = recipe_differences(recipe, folder)
    if differences:
        raise NapkinError(
            f"'{folder}' is a run of another recipe: there {'; '.join(differences)}: choose another folder, or "
            f"continue that run with `napkin resume {folder}`"
        )
    return True
