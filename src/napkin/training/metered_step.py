"""A step of any kind of training: one step of the process is metered, all others are timed."""

import contextlib
import dataclasses
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch
from torch import Tensor

from napkin.accounting.collectives import CollectiveClock
from napkin.accounting.ledger import METERED_STEP
from napkin.accounting.metering import StepMeasurement, meter_step
from napkin.accounting.pricing import Measurement, hfu, mfu
from napkin.accounting.quantities import QuantityTable
from napkin.accounting.rank_seconds import RankSeconds, on_one_clock, seconds_of_ranks, step_report
from napkin.checkpoint.folder import checkpoint_path, checkpoint_paths, read_checkpoint
from napkin.checkpoint.restore import load_train_state
from napkin.checkpoint.shard_files import frozen_path, stored_bytes
from napkin.errors import NapkinError
from napkin.hardware.competition import Sample, Sampler
from napkin.planning.step.run_plan import CHECKPOINT_BYTES, FROZEN_BYTES
from napkin.runs.accounting_files import MEASUREMENT_FILE, write_measurement
from napkin.runs.metrics import METRICS_FILE, StepMetrics, read_metrics_record
from napkin.train_step.step import Watch
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.non_finite import Verdict, skip_or_stop
from napkin.training.signals import Interrupted

IsFit = Callable[[Tensor, Tensor], bool]

SAMPLING_SECONDS = 1.0
"""The interval at which disturbance by other processes is sampled."""
MOST_SAMPLES = 1000
"""The last steps of a run whose undisturbed seconds are kept."""


def no_watch(part: str) -> AbstractContextManager:
    """A watch that does not time anything."""
    return nullcontext()


class MeteredStep(ABC):
    """A step of the loop; the kinds of training say what a batch is and how it is trained on."""

    computes_all_the_time = True
    """True if a step waits only for its own threads."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        """Seconds of all steps but the metered one."""
        self.planned_steps: list[float] = []
        """The same steps in planned steps, see `in_planned_steps`."""
        self.metered: StepMeasurement | None = None
        self.ranks: list[RankSeconds] = []
        """Every rank's bytes and seconds; empty in a single process, and before they were measured."""
        self.straggler: int | None = None
        """The rank that the others waited for."""
        self._process = psutil.Process()
        self._sampler: Sampler | None = None
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    @abstractmethod
    def batch(self, loop: TrainingLoop, number: int) -> Any:
        """The batch of step `number`, counted from 0."""

    @abstractmethod
    def train(self, loop: TrainingLoop, number: int, batch: Any, watch: Watch, is_fit: IsFit) -> Tensor:
        """Train on the batch as step `number`, and return the loss of the whole batch."""

    @abstractmethod
    def tensors(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of a batch to save if its loss is not finite."""

    @abstractmethod
    def tokens(self, loop: TrainingLoop) -> tuple[int, int, float | None]:
        """Called when the loop's step is done: tokens trained on so far, those of the step, and epochs."""

    @abstractmethod
    def micro_batches(self, loop: TrainingLoop, batch: Any) -> int:
        """The approximate number of micro-batches of the step."""

    def further_metrics(self) -> dict[str, float | None] | None:
        """Metrics of the last step by name, such as an objective's, for metrics.jsonl's `figures`."""
        return None

    def in_planned_steps(self, loop: TrainingLoop) -> float:
        """FLOPs of the step that was trained last, over those of the planned step; 1 where all steps are alike."""
        return 1.0

    def __call__(self, loop: TrainingLoop) -> StepMetrics:
        """Take the step. Raises Interrupted where a signal interrupts it, NapkinError where the loss is not finite."""
        begin, train_state = time.perf_counter(), loop.train_state
        with loop.watch("data"):
            batch = self.batch(loop, loop.step)
        verdict = Verdict(train_state.send_expert_tokens)
        try:
            self._watched_step(loop, batch, verdict)
        except Interrupted:
            train_state.optimizer.zero_grad(set_to_none=True)
            raise
        skipped = None
        if not verdict.is_fit:

            def repeat() -> Tensor:
                return self.train(loop, loop.step, batch, no_watch, lambda loss, norm: False)

            kept = self.tensors(batch)
            skipped = skip_or_stop(
                train_state, loop.history, loop.run, loop.step, kept, verdict, repeat, loop.on_message
            )
        step_seconds = time.perf_counter() - begin
        learning_rate = train_state.learning_rate(loop.step)
        expert_tokens, dropped_tokens = train_state.expert_tokens()
        on_gpu = loop.device_type == "cuda"
        loop.step += 1
        tokens, tokens_of_step, epochs = self.tokens(loop)
        return StepMetrics(
            step=loop.step,
            tokens=tokens,
            loss=verdict.loss,
            learning_rate=learning_rate,
            gradient_norm=verdict.gradient_norm,
            seconds=loop.seconds,
            step_seconds=step_seconds,
            tokens_per_second=tokens_of_step / step_seconds,
            mfu=loop.mfu(step_seconds, self.in_planned_steps(loop)),
            bytes=torch.cuda.max_memory_allocated() if on_gpu else self._process.memory_info().rss,
            spike=None if skipped else loop.history.add_loss(verdict.loss),
            skipped=skipped,
            expert_tokens=expert_tokens,
            dropped_tokens=dropped_tokens,
            epochs=epochs,
            figures=self.further_metrics(),
        )

    def _watched_step(self, loop: TrainingLoop, batch: Any, verdict: Verdict) -> None:
        done = loop.step - loop.first_step
        begin = time.perf_counter()
        metered = self._metered_number(loop)
        if loop.ranks.world_size > 1 and self.metered is not None and done == METERED_STEP + 1:
            with loop.watch("metering"):
                self._time_ranks(loop, batch, verdict)
            return
        if done != metered:
            watch = loop.watch
            if loop.ranks.world_size == 1:
                watch = loop.interruption.giving_up_long_steps(watch, self.micro_batches(loop, batch))
            if self._sampler is None:
                self.train(loop, loop.step, batch, watch, verdict)
            else:
                sample = self._sampler.sample(lambda: self.train(loop, loop.step, batch, watch, verdict))
                self._samples.append(sample)
            self._keep_seconds(loop, time.perf_counter() - begin)
            return
        with loop.watch("metering"):
            self._meter(loop, loop.step, batch, verdict)

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        """A context around all steps; of a single process on a CPU it watches what other processes do to them."""
        if loop.device_type != "cpu" or loop.ranks.world_size > 1 or not self.computes_all_the_time:
            yield
            return
        with Sampler(window=SAMPLING_SECONDS) as self._sampler:
            yield

    def _keep_seconds(self, loop: TrainingLoop, seconds: float) -> None:
        self.step_seconds.append(seconds)
        self.planned_steps.append(self.in_planned_steps(loop))

    def _time_ranks(self, loop: TrainingLoop, batch: Any, verdict: Verdict) -> None:
        """Time the collectives of a step on every rank; a collective."""
        assert self.metered is not None
        clock = CollectiveClock(loop.device_type)
        with clock.timing():
            self.train(loop, loop.step, batch, no_watch, verdict)
        self._keep_seconds(loop, clock.seconds)
        info = loop.ranks.info
        # Processes on one machine have one clock. Others begin to count when all have reached the same point.
        loop.ranks.all_reduce_max(0)
        offset = 0.0 if info.local_world_size == info.world_size else time.perf_counter()
        everyone = loop.ranks.all_gather(step_report(clock, self.metered.peak_bytes, offset))
        if loop.device_type == "cuda":
            everyone = on_one_clock(everyone)
        pipelined = loop.train_state.parallel_model.layout.pipeline > 1
        self.ranks, self.straggler = seconds_of_ranks(everyone, pipelined=pipelined)

    def _metered_number(self, loop: TrainingLoop) -> int | None:
        """The number of the step of this process that is metered."""
        last = loop.recipe.training.steps - loop.first_step - 1
        if last > 0:
            return min(METERED_STEP, last)
        # A single step is timed: metering slows it down. Where earlier processes have timed theirs, it is metered.
        return 0 if loop.first_step and not (loop.run.path / MEASUREMENT_FILE).exists() else None

    def _meter(self, loop: TrainingLoop, number: int, batch: Any, verdict: Verdict) -> None:
        train_state = loop.train_state
        self.metered = meter_step(
            train_state.model,
            lambda: self.train(loop, number, batch, no_watch, verdict),
            device_type=loop.device_type,
            resident=train_state.resident(),
        )

    def meter_discarded(self, loop: TrainingLoop) -> None:
        """Meter the run's last step once more, when all steps are done; the train state has to be restored then."""
        self._meter(loop, loop.step - 1, self.batch(loop, loop.step - 1), Verdict())

    def measurement(self, loop: TrainingLoop) -> Measurement | None:
        """The measurements of this process's steps; None where none was metered, or none timed.

        Where this process has timed no step, the seconds are those that earlier processes have logged.
        """
        plan = loop.preparation.plan
        if plan is None or self.metered is None:
            return None
        step_seconds = self.step_seconds
        if not step_seconds:
            # The last of all may be this process's, which was metered.
            last = min(loop.first_step, loop.recipe.training.steps - 1)
            logged = (line for line in read_metrics_record(loop.run.path / METRICS_FILE).metrics if line.step <= last)
            step_seconds = [line.step_seconds for line in logged if line.step_seconds > 0]
        if not step_seconds:
            return None
        median, seconds = statistics.median(step_seconds), sum(step_seconds)
        planned_steps = sum(self.planned_steps) or len(step_seconds)
        is_trained_here = loop.step > loop.first_step
        conditions = self._sampler.conditions() if self._sampler and self._samples else None
        alone = None
        if self._sampler and conditions is not None and conditions.busy:
            alone = statistics.median(self._sampler.undisturbed(self._samples))
        return Measurement(
            parameters=sum(parameter.numel() for parameter in loop.train_state.model.parameters()),
            flops=self.metered.ledger.flops,
            peak_bytes=self.metered.peak_bytes,
            seconds_per_step=median,
            seconds=loop.seconds if is_trained_here else loop.seconds_before,
            steps=loop.step - loop.first_step if self.step_seconds else len(step_seconds),
            mfu=mfu(plan.ledger, seconds, plan.site.matmul_peak, steps=planned_steps),
            hfu=hfu(plan.ledger, seconds, plan.site.matmul_peak, steps=planned_steps),
            seconds_by_part=loop.seconds_by_part() if is_trained_here else {},
            validation_loss=dict(loop.history.validation_losses).get(loop.recipe.training.steps),
            seconds_alone=alone,
            conditions=conditions,
        )


class Accounting(Callback):
    """Keeps the accounts of a run in measurement.json: written before the last checkpoint, and again after it, with the
    seconds that it took.

    A run whose last checkpoint is on the disk thus has its measurement. One that has none, because an earlier process
    was killed before it had metered a step, is metered when it is resumed.
    """

    def __init__(self, step: MeteredStep) -> None:
        self._step = step
        self.measurement: Measurement | None = None
        """The measurement of this process's steps; None where there were too few to meter one and time another."""
        self.table = QuantityTable()

    def running(self, loop: TrainingLoop) -> AbstractContextManager:
        return self._step.running(loop)

    def on_end(self, loop: TrainingLoop) -> None:
        """Write what is measured so far; meter a step of a run that is complete but for its measurement."""
        # An earlier process made the last of several steps, and was killed before it wrote a measurement.
        is_complete = loop.first_step == loop.recipe.training.steps > 1
        if loop.ranks.broadcast_from_zero(lambda: is_complete and not (loop.run.path / MEASUREMENT_FILE).exists()):
            self._step.meter_discarded(loop)
            checkpoint = read_checkpoint(checkpoint_path(loop.run.checkpoints, loop.step), verify=False)
            load_train_state(checkpoint, loop.train_state)
        # The checkpoint is what matters: an error is raised when it is on the disk.
        with contextlib.suppress(NapkinError, OSError):
            self.write(loop)

    def write(self, loop: TrainingLoop) -> None:
        measurement, plan = self._step.measurement(loop), loop.preparation.plan
        if measurement is None or plan is None:
            return
        if loop.step > loop.first_step:
            self.measurement = measurement
        if loop.frozen is not None and loop.ranks.is_rank_zero:
            # Bytes on the disk of frozen weights, which the run keeps once, and of the newest checkpoint.
            further = {**measurement.further, FROZEN_BYTES: stored_bytes([frozen_path(loop.run.checkpoints)])}
            for newest in checkpoint_paths(loop.run.checkpoints)[:1]:
                further[CHECKPOINT_BYTES] = stored_bytes(newest.glob("*.safetensors"))
            measurement = dataclasses.replace(measurement, further=further)
        whole, price = loop.step == loop.recipe.training.steps, plan.site.usd_per_hour
        self.table = write_measurement(
            loop.run,
            plan.table(),
            measurement,
            whole=whole,
            usd_per_hour=price,
            ranks=self._step.ranks,
            straggler=self._step.straggler,
        )
