"""The training loop: steps, metrics, evaluations, checkpoints, and an orderly end however it comes."""

import contextlib
import dataclasses
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from napkin.accounting.meter import StepMeasurement, Stopwatch, meter_step
from napkin.accounting.plan import hfu, mfu
from napkin.accounting.quantity_row import QuantityRow
from napkin.accounting.reconcile import Measurement
from napkin.checkpoint.checkpoint import Checkpoint, Snapshot, snapshot
from napkin.checkpoint.disk_space import disk_warning, refuse_full_disk, writes_in_background
from napkin.checkpoint.sharded_writer import open_writer, restore_on_ranks
from napkin.data.mixing import TokenMixture
from napkin.data.prefetch import Batch, open_fetcher
from napkin.data.token_file import TokenFile
from napkin.data.token_guard import TokenGuard
from napkin.errors import CorruptFile, NapkinError
from napkin.evaluation.bits_per_byte import EVALUATION_BATCH_SIZE, mean_loss
from napkin.hardware.malloc import keep_freed_memory
from napkin.planning.preparation import Preparation
from napkin.runs.history import History
from napkin.runs.measurement_file import write_measurement
from napkin.runs.run_folder import (
    MetricsFile,
    RunFolder,
    StepMetrics,
    format_metrics,
    lower_learning_rate,
    parse_metrics,
)
from napkin.train_step.step import TrainState, build_train_state
from napkin.training.compile_first import compile_first
from napkin.training.lost_pages import leaving_on_lost_pages
from napkin.training.non_finite import NonFiniteSteps, Verdict
from napkin.training.signals import Interrupted, Interruption, catch_interruption
from napkin.training.start import plan_as_dict
from napkin.training.tracking import open_tracking

# The first step makes the optimizer's state, the second one warms caches: the third is like all that follow.
METERED_STEP = 2


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    train_state: TrainState
    step: int
    """Updates done."""
    checkpoint: Path
    interrupted_by: signal.Signals | None
    measurement: Measurement | None
    """Of this process's steps; None where they were too few for one to be metered and another to be timed."""
    table: list[QuantityRow]
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
    step number. SIGINT and SIGTERM end it after the step at hand, with a checkpoint; an evaluation, and a step of many
    micro-batches, are given up and made up for on resuming. With several ranks all call this, give nothing up, and stop
    after the same step; the first one writes.
    """
    ranks = preparation.ranks
    with run.locked(), catch_interruption() as interruption:
        run.remove_leftovers()
        # A kill may have come between the making of the folder and the plan.
        if not (run.path / "plan.json").exists():
            run.write_json("plan.json", plan_as_dict(preparation.plan, preparation.precision))
        loop = _Loop(preparation, run, on_message, interruption)
        loop.restore()
        compile_first(loop.train_state, preparation, loop.watch, interruption, on_message)
        with (
            loop.writer,
            leaving_on_lost_pages(loop.last_words),
            contextlib.closing(loop.feed),
            open_tracking(preparation.recipe, run, loop.step, on_message) as track,
        ):
            while loop.is_unfinished and ranks.agreed(interruption) is None:
                metrics = loop.advance()
                if metrics is not None:
                    track(metrics)
                    on_step(metrics)
            # Before the trackers are closed, which may wait for a net.
            checkpoint = loop.finish()
        if not loop.is_unfinished:
            interruption.signal = None
        measurement = loop.measurement()
        whole = loop.step == preparation.recipe.training.steps
        table = [] if measurement is None else write_measurement(run, preparation.plan, measurement, whole=whole)
        return Outcome(
            loop.train_state, loop.step, checkpoint.path, interruption.signal, measurement, table, loop.first_step
        )


@dataclass
class _Loop:
    preparation: Preparation
    run: RunFolder
    on_message: Callable[[str], None]
    interruption: Interruption
    step: int = 0
    reading_batch: bool = False
    seconds_before: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    metered: StepMeasurement | None = None

    def __post_init__(self) -> None:
        recipe = self.preparation.recipe
        assert recipe.training.threads is not None
        torch.set_num_threads(recipe.training.threads)
        keep_freed_memory()
        self.device_type = self.preparation.precision.device_type
        self.ranks = self.preparation.ranks
        compiled = recipe.training.compile == "on"
        self.train_state = build_train_state(recipe, self.preparation.precision, self.ranks, compiled=compiled)
        self.feed = open_fetcher(self.preparation.batches, self.device_type, recipe.data.prefetch)
        self.metrics = MetricsFile(self.run)
        self.guards = {tokens: TokenGuard(tokens) for tokens in self._token_files()}
        self.watch = Stopwatch(self.device_type)
        self.process = psutil.Process()
        self.history = History()
        training, plan = recipe.training, self.preparation.plan
        self.writer = open_writer(
            self.ranks,
            recipe,
            self.run.checkpoints,
            background=self.ranks.is_first and writes_in_background(training, plan, self.device_type),
            keep=training.keep_checkpoints,
            keep_best=training.keep_best,
            # A checkpoint on the disk promises the lines up to its step.
            before_publishing=self.metrics.sync,
        )

    def restore(self) -> None:
        """Go to the newest checkpoint that is whole; to the beginning where there is none at all."""
        checkpoint = restore_on_ranks(
            self.ranks,
            self.run.checkpoints,
            self.train_state,
            tokenizer=self.preparation.tokenizer.fingerprint,
            train_tokens=self.preparation.train_tokens.sha256,
            on_message=self.on_message,
        )
        if checkpoint is not None:
            self.step, self.seconds_before = checkpoint.state.step, checkpoint.state.seconds
            self.history = checkpoint.state.history.copy()
        self.history.unfinished = self.ranks.from_first(self._settle_metrics)
        self.non_finite = NonFiniteSteps(self.train_state, self.history, self.run, self.on_message)
        self.start = time.perf_counter()
        self.first_step = self.step
        if self.is_unfinished and self.ranks.is_first:
            needed = self._snapshot().bytes
            refuse_full_disk(self.run.checkpoints, needed)
            warning = disk_warning(self.run.checkpoints, needed, self.preparation.recipe.training)
            if warning is not None:
                self.on_message(warning)

    def _settle_metrics(self) -> str | None:
        """Bring metrics.jsonl to the checkpoint; the line that is still to be finished."""
        self.metrics.rewind(self.step)
        self.history.forget_finished(self.run.path / "metrics.jsonl")
        return self.history.unfinished

    @property
    def is_unfinished(self) -> bool:
        """Whether a step is to be done, or the evaluation after the last one."""
        return self.step < self.preparation.recipe.training.steps or self.history.unfinished is not None

    @property
    def seconds(self) -> float:
        """Of training so far, time between a kill and a resume left out."""
        return self.seconds_before + time.perf_counter() - self.start

    def advance(self) -> StepMetrics | None:
        """Do one step and what is due after it; None where a signal has prevented one or the other."""
        self.writer.refuse_failure()
        unfinished = self.history.unfinished
        metrics = self._train() if unfinished is None else parse_metrics(unfinished)
        return None if metrics is None else self._conclude(metrics)

    def _train(self) -> StepMetrics | None:
        begin = time.perf_counter()
        with self.watch("data"):
            batch = self._batch()
            shares = self.train_state.shares(batch[1]) if self.ranks.size > 1 else None
        verdict = Verdict()
        try:
            self._watched_step(batch, shares, verdict)
        except Interrupted:
            self.train_state.optimizer.zero_grad(set_to_none=True)
            return None
        skipped = None if verdict.is_fit else self.non_finite.skip_or_stop(self.step, batch, verdict)
        step_seconds = time.perf_counter() - begin
        learning_rate = self.train_state.learning_rate(self.step)
        expert_tokens, dropped_tokens = self.train_state.tally.read()
        self.step += 1
        return StepMetrics(
            step=self.step,
            tokens=self.step * self.preparation.recipe.tokens_per_step,
            loss=verdict.loss,
            learning_rate=learning_rate,
            gradient_norm=verdict.gradient_norm,
            seconds=self.seconds,
            step_seconds=step_seconds,
            tokens_per_second=self.preparation.recipe.tokens_per_step / step_seconds,
            mfu=mfu(self.preparation.plan.ledger, step_seconds, self.preparation.plan.site.matmul_peak),
            bytes=self._bytes(),
            spike=None if skipped else self.history.add_loss(verdict.loss),
            skipped=skipped,
            expert_tokens=expert_tokens,
            dropped_tokens=dropped_tokens,
        )

    def _conclude(self, metrics: StepMetrics) -> StepMetrics | None:
        """Evaluate, log and save what is due after a step."""
        training = self.preparation.recipe.training
        last = self.step == training.steps
        due = self.step % training.checkpoint_every == 0
        # Until this is done, a checkpoint says that it is to be.
        self.history.unfinished = format_metrics(metrics)
        if last or self.step % training.evaluate_every == 0:
            try:
                validation_loss = self._evaluate()
            except Interrupted:
                return None
            self._refuse_non_finite(f"the validation loss is {validation_loss}", validation_loss or 0.0)
            metrics = dataclasses.replace(metrics, validation_loss=validation_loss, seconds=self.seconds)
            if validation_loss is not None:
                self.history.add_validation(self.step, validation_loss)
                due |= self.ranks.from_first(lambda: self.writer.lacks(self.step, self.history))
        self.history.unfinished = None
        if last or metrics.is_notable or self.step % training.log_every == 0:
            self.metrics.append(metrics)
        if due and not last:
            self.save()
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the state as it is, or begin to."""
        with self.watch("checkpoints"):
            self.writer.save(self._snapshot())

    def finish(self) -> Checkpoint:
        """Return the last checkpoint when it is on the disk."""
        with self.watch("checkpoints"):
            # Nothing else is to be done meanwhile: no copy is needed.
            self.writer.wait()
            self.writer.background = False
            self.writer.save(self._snapshot())
            checkpoint = self.writer.wait()
            assert checkpoint is not None
            return checkpoint

    def _snapshot(self) -> Snapshot:
        self.train_state.spread.settle()
        return snapshot(
            self.train_state,
            step=self.step,
            seconds=self.seconds,
            tokenizer=self.preparation.tokenizer.fingerprint,
            train_tokens=self.preparation.train_tokens.sha256,
            history=self.history,
        )

    def _token_files(self) -> list[TokenFile | TokenMixture]:
        files = (self.preparation.train_tokens, self.preparation.validation_tokens)
        return [tokens for tokens in files if tokens is not None]

    def _batch(self) -> Batch:
        self.reading_batch = True
        with self._guarded(self.preparation.train_tokens):
            batch = self.feed[self.step]
        self.reading_batch = False
        return batch

    def last_words(self) -> str:
        """What to say when pages of a mapped file are lost; a checkpoint is left where the train state is whole."""
        files = " or ".join(f"'{file.path}'" for guard in self.guards.values() for file in guard.files)
        line = f"{files} was shortened, or its disk has gone, while the run read it: put it back and continue with "
        line += f"`napkin resume {self.run.path}`; "
        if not self.reading_batch or self.ranks.size > 1:
            return line + "earlier checkpoints are kept"
        self.finish()
        return f"{line}nothing was learned from it, step {self.step} is saved"

    @contextmanager
    def _guarded(self, tokens: TokenFile | TokenMixture) -> Iterator[None]:
        """Read tokens that are, before and after, those that were checked; if not, leave a checkpoint and raise."""
        try:
            self.guards[tokens].verify_unchanged()
            yield
            self.guards[tokens].verify_unchanged()
        except CorruptFile as error:
            if self.ranks.size > 1:
                # The others know nothing of it, and a checkpoint needs all.
                raise
            self.finish()
            raise CorruptFile(f"{error}; nothing was learned from it, step {self.step} is saved") from None

    def measurement(self) -> Measurement | None:
        """What the steps of this process came to."""
        if self.metered is None or not self.step_seconds:
            return None
        plan, seconds = self.preparation.plan, time.perf_counter() - self.start
        median = statistics.median(self.step_seconds)
        parts = dict(self.watch.seconds)
        return Measurement(
            parameters=sum(parameter.numel() for parameter in self.train_state.model.parameters()),
            flops=self.metered.ledger.flops,
            peak_bytes=self.metered.peak_bytes,
            seconds_per_step=median,
            seconds=self.seconds,
            steps=self.step - self.first_step,
            mfu=mfu(plan.ledger, median, plan.site.matmul_peak),
            hfu=hfu(plan.ledger, median, plan.site.matmul_peak),
            seconds_by_part={**parts, "other": seconds - sum(parts.values())},
        )

    def _watched_step(self, batch: Batch, shares: list[float] | None, verdict: Verdict) -> None:
        done = self.step - self.first_step
        begin = time.perf_counter()
        last = self.preparation.recipe.training.steps - self.first_step - 1
        # A last step that is also the first is timed: a metered one takes longer than it would alone.
        if done != min(METERED_STEP, last) or last == 0 or not self.ranks.is_first:
            watch = self.watch
            if self.ranks.size == 1:
                watch = self.interruption.giving_up_long_steps(watch, len(batch[0]) // self._micro_batch_size)
            self.train_state.step(self.step, *batch, shares=shares, watch=watch, is_fit=verdict)
            self.step_seconds.append(time.perf_counter() - begin)
            return
        with self.watch("metering"):
            self.metered = meter_step(
                self.train_state.model,
                lambda: self.train_state.step(self.step, *batch, shares=shares, is_fit=verdict),
                device_type=self.device_type,
                resident=self.train_state.resident(),
            )

    @property
    def _micro_batch_size(self) -> int:
        return self.preparation.recipe.training.resolved_micro_batch_size

    def _evaluate(self) -> float | None:
        tokens = self.preparation.validation_tokens
        if tokens is None:
            return None
        with self.watch("evaluation"), self._guarded(tokens), self.train_state.averaged():
            training = self.preparation.recipe.training
            return mean_loss(
                self.train_state.model,
                tokens,
                self.preparation.precision,
                max_tokens=training.evaluation_tokens,
                # No more at a time than a step computes: what was planned for that is enough for this.
                batch_size=min(self._micro_batch_size, EVALUATION_BATCH_SIZE),
                separate_documents=self.preparation.recipe.data.separate_documents,
                progress=lambda done, total: (
                    self.interruption.give_up() if done < total and self.ranks.size == 1 else None
                ),
                ranks=self.ranks,
            )

    def _refuse_non_finite(self, what: str, *figures: float) -> None:
        if not all(map(math.isfinite, figures)):
            raise NapkinError(f"step {self.step}: {what}: {lower_learning_rate(self.run.path)}")

    def _bytes(self) -> int:
        if self.device_type == "cuda":
            return torch.cuda.max_memory_allocated()
        return self.process.memory_info().rss
