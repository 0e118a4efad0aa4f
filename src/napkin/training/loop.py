"""The training loop: steps, metrics, evaluations, checkpoints, and an orderly end however it comes."""

import contextlib
import dataclasses
import math
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from napkin.accounting.meter import StepMeasurement, Stopwatch, meter_step
from napkin.accounting.plan import hfu, mfu
from napkin.accounting.reconcile import Measurement, reconcile
from napkin.accounting.witnesses import WitnessRow
from napkin.data.feed import open_feed
from napkin.errors import NapkinError
from napkin.training.checkpoint import Checkpoint, prune_checkpoints, save_checkpoint
from napkin.training.evaluation import EVALUATION_BATCH_SIZE, mean_loss
from napkin.training.interruption import catch_interruption
from napkin.training.preparation import Preparation
from napkin.training.restoring import restore_newest
from napkin.training.run_folder import MetricsFile, RunFolder, StepMetrics
from napkin.training.runs import plan_as_dict
from napkin.training.step import Learner, build_learner
from napkin.training.token_guard import TokenGuard
from napkin.training.tracking import open_tracking

# The first step makes the optimizer's state, the second one warms caches: the third is like all that follow.
METERED_STEP = 2


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    learner: Learner
    step: int
    """Updates done."""
    checkpoint: Path
    interrupted_by: signal.Signals | None
    measurement: Measurement | None
    """Of this process's steps; None where they were too few for one to be metered and another to be timed."""
    table: list[WitnessRow]
    """Rule, count and meter of every quantity; without a measurement, empty."""
    first_step: int
    """Updates that were done before: by the checkpoint that training went on from, or none."""


def train(
    preparation: Preparation,
    run: RunFolder,
    *,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    on_message: Callable[[str], None] = lambda message: None,
) -> Outcome:
    """Train a run to its end, from its newest good checkpoint if it has one, and write its metrics and checkpoints.

    The steps that remain are bit for bit those of a run that was never stopped, on the same machine with the same
    number of threads: weights, moments and step number come from the checkpoint, everything else is a function of the
    step number. SIGINT and SIGTERM end it after the step at hand, with a checkpoint.
    """
    with run.locked(), catch_interruption() as interruption:
        run.remove_leftovers()
        # A kill may have come between the making of the folder and the plan.
        if not (run.path / "plan.json").exists():
            run.write_json("plan.json", plan_as_dict(preparation.plan, preparation.precision))
        loop = _Loop(preparation, run, on_message)
        loop.restore()
        with (
            contextlib.closing(loop.feed),
            open_tracking(preparation.recipe, run, loop.step, on_message) as track,
        ):
            while loop.step < preparation.recipe.training.steps and interruption.signal is None:
                metrics = loop.advance()
                track(metrics)
                on_step(metrics)
            # Before the trackers are closed, which may wait for a net.
            checkpoint = loop.save()
        if loop.step == preparation.recipe.training.steps:
            interruption.signal = None
        measurement = loop.measurement()
        whole = loop.step == preparation.recipe.training.steps
        table = [] if measurement is None else _keep_books(run, preparation, measurement, whole=whole)
        return Outcome(
            loop.learner, loop.step, checkpoint.path, interruption.signal, measurement, table, loop.first_step
        )


def _keep_books(run: RunFolder, preparation: Preparation, measurement: Measurement, *, whole: bool) -> list[WitnessRow]:
    table = reconcile(preparation.plan, measurement)
    if not whole:
        # The plan's figure is of all steps: there is nothing to put beside it yet.
        table = [dataclasses.replace(row, meter=None) if row.quantity == "seconds in all" else row for row in table]
    run.write_json(
        "measurement.json",
        {
            "table": table,
            "seconds": measurement.seconds_by_part,
            "mfu": measurement.mfu,
            "hfu": measurement.hfu,
            "steps": measurement.steps,
        },
    )
    return table


@dataclass
class _Loop:
    preparation: Preparation
    run: RunFolder
    on_message: Callable[[str], None]
    step: int = 0
    seconds_before: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    metered: StepMeasurement | None = None

    def __post_init__(self) -> None:
        recipe = self.preparation.recipe
        assert recipe.training.threads is not None
        torch.set_num_threads(recipe.training.threads)
        self.device_type = self.preparation.precision.device_type
        self.learner = build_learner(recipe, self.preparation.precision)
        self.feed = open_feed(self.preparation.batches, self.device_type, recipe.data.prefetch)
        self.metrics = MetricsFile(self.run)
        self.guard = TokenGuard(self.preparation.train_tokens)
        self.watch = Stopwatch(self.device_type)
        self.process = psutil.Process()

    def restore(self) -> None:
        """Go to the newest checkpoint that is whole; to the beginning where there is none at all."""
        checkpoint = restore_newest(
            self.run.checkpoints,
            self.learner,
            tokenizer=self.preparation.tokenizer.fingerprint,
            train_tokens=self.preparation.train_tokens.sha256,
            on_message=self.on_message,
        )
        if checkpoint is not None:
            self.step, self.seconds_before = checkpoint.state.step, checkpoint.state.seconds
        self.metrics.rewind(self.step)
        self.start = time.perf_counter()
        self.first_step = self.step

    @property
    def seconds(self) -> float:
        """Of training so far, time between a kill and a resume left out."""
        return self.seconds_before + time.perf_counter() - self.start

    def advance(self) -> StepMetrics:
        """Do one step and what is due after it."""
        training = self.preparation.recipe.training
        begin = time.perf_counter()
        with self.watch("data"):
            batch = self.feed[self.step]
        loss, norm = self._watched_step(*batch)
        loss, norm = loss.item(), norm.item()
        step_seconds = time.perf_counter() - begin
        learning_rate = self.learner.learning_rate(self.step)
        self.step += 1
        self._refuse_non_finite(f"the loss is {loss}, the gradient's norm {norm}", loss, norm)
        last = self.step == training.steps
        validation_loss = self._evaluate() if last or self.step % training.evaluate_every == 0 else None
        self._refuse_non_finite(f"the validation loss is {validation_loss}", validation_loss or 0.0)
        metrics = StepMetrics(
            step=self.step,
            tokens=self.step * self.preparation.recipe.tokens_per_step,
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=norm,
            seconds=self.seconds,
            step_seconds=step_seconds,
            tokens_per_second=self.preparation.recipe.tokens_per_step / step_seconds,
            mfu=mfu(self.preparation.plan.ledger, step_seconds, self.preparation.plan.site.matmul_peak),
            bytes=self._bytes(),
            validation_loss=validation_loss,
            **self.learner.tally.read(),
        )
        if last or validation_loss is not None or self.step % training.log_every == 0:
            self.metrics.append(metrics)
        if self.step % training.checkpoint_every == 0 and not last:
            self.save()
        return metrics

    def save(self) -> Checkpoint:
        """Write a checkpoint of the state as it is."""
        with self.watch("checkpoints"):
            self.guard.refuse_changes()
            # A checkpoint on the disk promises the lines up to its step.
            self.metrics.sync()
            checkpoint = save_checkpoint(
                self.run.checkpoints,
                self.learner,
                step=self.step,
                seconds=self.seconds,
                tokenizer=self.preparation.tokenizer.fingerprint,
                train_tokens=self.preparation.train_tokens.sha256,
            )
            prune_checkpoints(self.run.checkpoints, keep=self.preparation.recipe.training.keep_checkpoints)
        return checkpoint

    def measurement(self) -> Measurement | None:
        """What the steps of this process came to."""
        if self.metered is None or not self.step_seconds:
            return None
        plan, seconds = self.preparation.plan, time.perf_counter() - self.start
        median = statistics.median(self.step_seconds)
        parts = dict(self.watch.seconds)
        return Measurement(
            parameters=sum(parameter.numel() for parameter in self.learner.model.parameters()),
            flops=self.metered.ledger.flops,
            peak_bytes=self.metered.peak_bytes,
            seconds_a_step=median,
            seconds=self.seconds,
            steps=self.step - self.first_step,
            mfu=mfu(plan.ledger, median, plan.site.matmul_peak),
            hfu=hfu(plan.ledger, median, plan.site.matmul_peak),
            seconds_by_part={**parts, "other": seconds - sum(parts.values())},
        )

    def _watched_step(self, *batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        done = self.step - self.first_step
        begin = time.perf_counter()
        last = self.preparation.recipe.training.steps - self.first_step - 1
        # A last step that is also the first is timed: a metered one takes longer than it would alone.
        if done != min(METERED_STEP, last) or last == 0:
            result = self.learner.step(self.step, *batch, watch=self.watch)
            self.step_seconds.append(time.perf_counter() - begin)
            return result
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        with self.watch("metering"):
            self.metered = meter_step(
                self.learner.model,
                lambda: results.append(self.learner.step(self.step, *batch)),
                device_type=self.device_type,
            )
        return results[0]

    def _evaluate(self) -> float | None:
        tokens = self.preparation.validation_tokens
        if tokens is None:
            return None
        with self.watch("evaluation"):
            training = self.preparation.recipe.training
            return mean_loss(
                self.learner.model,
                tokens,
                self.preparation.precision,
                max_tokens=training.evaluation_tokens,
                # No more at a time than a step computes: what was planned for that is enough for this.
                batch_size=min(training.resolved_micro_batch_size, EVALUATION_BATCH_SIZE),
                separate_documents=self.preparation.recipe.data.separate_documents,
            )

    def _refuse_non_finite(self, what: str, *figures: float) -> None:
        if not all(map(math.isfinite, figures)):
            raise NapkinError(
                f"step {self.step}: {what}: lower --optimizer.learning-rate; "
                f"earlier checkpoints in '{self.run.checkpoints}' are kept"
            )

    def _bytes(self) -> int:
        if self.device_type == "cuda":
            return torch.cuda.max_memory_allocated()
        return self.process.memory_info().rss
