"""Callbacks of any run around its steps, a class each: metrics, checkpoints, trackers.

The loop knows only the protocol `Callback`. Callbacks are called in their order; they also work with other kinds of
training steps.
"""

import dataclasses
import io
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from napkin.accounting.ledger import METERED_STEP
from napkin.checkpoint.folder import checkpoint_paths, disk_warning, read_checkpoint, refuse_full_disk
from napkin.checkpoint.sharded_writer import open_writer
from napkin.checkpoint.state import Checkpoint, Snapshot, snapshot
from napkin.errors import CorruptFile
from napkin.files import StrPath
from napkin.planning.step.plan_file import writes_in_background
from napkin.report.page import REPORT_FILE
from napkin.runs.accounting_files import MEASUREMENT_FILE
from napkin.runs.metrics import METRICS_FILE, MetricsFile, StepMetrics, read_metrics_record
from napkin.runs.run_folder import RunFolder
from napkin.training.loop import Callback, TrainingLoop


class MetricsLog(Callback):
    """Appends a line to metrics.jsonl for each logged step."""

    def __init__(self, loop: TrainingLoop) -> None:
        self.file = MetricsFile(loop.run.path, writes=loop.ranks.is_rank_zero)

    def on_start(self, loop: TrainingLoop) -> None:
        """Drop the lines past the checkpoint and say which are damaged; find out whether the last step is
        unfinished."""

        def rewind() -> str | None:
            for message in self.file.rewind(loop.step, last_logged=loop.history.last_logged):
                loop.on_message(message)
            loop.history.forget_finished(self.file.path)
            return loop.history.unfinished

        loop.history.unfinished = loop.ranks.broadcast_from_zero(rewind)

    def after_step(self, loop: TrainingLoop, metrics: StepMetrics) -> StepMetrics:
        """Log the finished step."""
        loop.history.unfinished = None
        training = loop.recipe.training
        if loop.step == training.steps or metrics.is_notable or loop.step % training.log_every == 0:
            self.file.append(metrics)
            loop.history.last_logged = loop.step
        return metrics


class Checkpointing(Callback):
    """Writes a checkpoint when due, after an evaluation that is the best so far, and at the end."""

    def __init__(self, loop: TrainingLoop, metrics: MetricsLog) -> None:
        training, plan = loop.recipe.training, loop.preparation.plan
        self.last: Checkpoint | None = None
        self.writer = open_writer(
            loop.ranks,
            loop.preparation.resolved.layout,
            loop.run.checkpoints,
            background=plan is not None and writes_in_background(plan),
            keep=training.keep_checkpoints,
            keep_best=training.keep_best,
            # The lines up to a checkpoint's step must be on the disk before it.
            before_publishing=metrics.file.sync,
        )

    def on_start(self, loop: TrainingLoop) -> None:
        """Raise NapkinError where the disk has no space for the next checkpoint."""
        if not loop.is_unfinished:
            return
        needed = self.writer.bytes_of(snapshot_of(loop))
        if loop.ranks.is_rank_zero:
            refuse_full_disk(loop.run.checkpoints, needed)
            warning = disk_warning(loop.run.checkpoints, needed, loop.recipe.training)
            if warning is not None:
                loop.on_message(warning)

    def running(self, loop: TrainingLoop) -> AbstractContextManager:
        return self.writer

    def before_step(self, loop: TrainingLoop) -> None:
        """Raise the error of a failed write in the background."""
        self.writer.refuse_failure()

    def after_step(self, loop: TrainingLoop, metrics: StepMetrics) -> StepMetrics:
        """Write a checkpoint, or start writing one in the background; the last one is written at the end."""
        due = loop.step % loop.recipe.training.checkpoint_every == 0
        if metrics.validation_loss is not None:
            due |= loop.ranks.broadcast_from_zero(lambda: self.writer.lacks(loop.step, loop.history))
        if due and loop.step != loop.recipe.training.steps:
            with loop.watch("checkpoints"):
                self.writer.save(snapshot_of(loop))
        return metrics

    def on_end(self, loop: TrainingLoop) -> None:
        with loop.watch("checkpoints"):
            # Training has ended, so no copy is needed.
            self.writer.wait()
            self.writer.background = False
            self.writer.save(snapshot_of(loop))
            self.last = self.writer.wait()


class Trackers(Callback):
    """Sends the lines of metrics.jsonl to the recipe's trackers, on rank 0. One that fails is reported and disabled."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        names = loop.recipe.tracking.trackers if loop.ranks.is_rank_zero else ()
        if names:
            known = loop.run.read_json("tracking.json")
            identifier = known.get("id") if isinstance(known, dict) else None
            if not isinstance(identifier, str):
                identifier = secrets.token_hex(8)
                loop.run.write_json("tracking.json", {"id": identifier})
            recipe = dataclasses.asdict(loop.recipe)
            tracked = TrackedRun(loop.run.path, identifier, loop.recipe.tracking.project, loop.step, recipe)
            for name in dict.fromkeys(names):
                opened = self._try(loop, name, lambda name=name: TRACKERS[name](tracked))
                if opened is not None:
                    self._open[name] = opened
        try:
            yield
        finally:
            for name, tracker in list(self._open.items()):
                self._try(loop, name, tracker.close)

    def after_step(self, loop: TrainingLoop, metrics: StepMetrics) -> StepMetrics:
        training = loop.recipe.training
        is_logged = metrics.step == training.steps or metrics.step % training.log_every == 0
        if self._open and (is_logged or metrics.validation_loss is not None):
            values = metrics_of(metrics)
            for name, tracker in list(self._open.items()):
                self._try(loop, name, lambda tracker=tracker: tracker.log(metrics.step, values))
        return metrics

    def _try(self, loop: TrainingLoop, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # no error of a tracker may stop a run
            self._open.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            loop.on_message(f"tracker {name} has failed and is disabled ({reason}); metrics.jsonl has everything")
            return None


class OnStep(Callback):
    """Calls a user's function after each step."""

    def __init__(self, function: Callable[[StepMetrics], None]) -> None:
        self.function = function

    def after_step(self, loop: TrainingLoop, metrics: StepMetrics) -> StepMetrics:
        self.function(metrics)
        return metrics


def snapshot_of(loop: TrainingLoop) -> Snapshot:
    loop.train_state.parallel_model.reshard()
    return snapshot(
        loop.train_state,
        step=loop.step,
        seconds=loop.seconds,
        tokenizer=loop.preparation.tokenizer.fingerprint,
        train_tokens=loop.preparation.data_checksum,
        history=loop.history,
        frozen=loop.frozen,
    )


def finished_checkpoint(folder: StrPath) -> Checkpoint | None:
    """The last checkpoint of a run that has nothing left to do, verified; else None.

    This is checked before the run's text is verified and its step is planned. In such a run all steps are done, the
    accounts are closed, no line of metrics.jsonl is damaged, and the recipe is the one with which the run was created.
    """
    run = RunFolder.open(folder)
    newest = next(iter(checkpoint_paths(run.checkpoints)), None)
    if newest is None:
        return None
    try:
        # Small files are read first: for most resumed runs, the metrics and the weights need not be read.
        state = read_checkpoint(newest, verify=False).state
        if state.step < run.recipe.training.steps or state.history.unfinished is not None:
            return None
        metered = (run.path / MEASUREMENT_FILE).exists() or run.recipe.training.steps <= METERED_STEP
        if run.recipe_was_changed or not metered or not (run.path / REPORT_FILE).exists():
            return None
        record = read_metrics_record(run.path / METRICS_FILE)
        if record.messages() or record.incomplete is not None:
            return None
        return read_checkpoint(newest)
    except CorruptFile:
        # Training skips it, and continues from an earlier one.
        return None


# TensorBoard, Weights & Biases and trackio behind one small interface; each is imported when it is used.


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for trackers."""

    folder: Path
    identifier: str
    """An identifier that is the same for every process that trains the run."""
    project: str
    step: int
    """Updates done before: the step that a resumed run continues from."""
    recipe: dict[str, dict[str, Any]]


class Tracker(Protocol):
    """Receives metrics of steps."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None:
        """Write everything that is buffered."""
        ...


class TensorBoard:
    """Event files in the run's folder, tensorboard/."""

    def __init__(self, run: TrackedRun) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

            # Events of an earlier process for steps that are repeated are hidden.
            purge = run.step + 1 if run.step else None
            self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge, flush_secs=30)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run at wandb.ai, or wherever WANDB_MODE and WANDB_BASE_URL say; its files are in the run's folder, wandb/."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=run.project,
            name=run.folder.name,
            id=run.identifier,
            resume="allow",
            dir=str(run.folder),
            config=run.recipe,
            # wandb must not capture the terminal.
            settings=wandb.Settings(console="off"),
        )
        # A step that is repeated after a kill has a smaller number than the last one; wandb's own step must increase.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Send everything that is buffered, if there is a network."""
        self._run.finish()


class Trackio:
    """A run in trackio's own database, which `trackio show` displays."""

    def __init__(self, run: TrackedRun) -> None:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            import trackio  # pyright: ignore[reportMissingImports]

            # trackio identifies a run by its name.
            name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', run.folder.name)}-{run.identifier[:6]}"
            own = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
            self._finish = trackio.finish
            self._run = trackio.init(run.project, name=name, config=run.recipe, resume="allow", **own)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        # trackio prints to standard output, which holds the command's results.
        with redirect_stdout(io.StringIO()):
            self._finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def metrics_of(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl by name; of experts, the largest load relative to a uniform one."""
    values = {
        name: float(value) for name, value in vars(metrics).items() if isinstance(value, int | float) and name != "step"
    }
    if metrics.expert_tokens is not None:
        values["busiest_expert"] = max(max(layer) * len(layer) / max(1, sum(layer)) for layer in metrics.expert_tokens)
    if metrics.dropped_tokens is not None:
        values["dropped_tokens"] = float(sum(metrics.dropped_tokens))
    return values
