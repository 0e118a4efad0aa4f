"""The step of a training run: one step of the process is metered, all others are timed."""

import statistics
import time

import psutil
import torch

from napkin.accounting.collective_clock import CollectiveClock
from napkin.accounting.metering import METERED_STEP, StepMeasurement, meter_step
from napkin.accounting.rank_seconds import RankSeconds, seconds_of_ranks, told
from napkin.accounting.run_measurement import Measurement
from napkin.accounting.utilisation import hfu, mfu
from napkin.data.mixing import TokenMixture
from napkin.data.prefetch import Batch
from napkin.runs.measurement_file import MEASUREMENT_FILE
from napkin.runs.metrics import METRICS_FILE, StepMetrics, read_metrics_record
from napkin.training.loop import TrainingLoop
from napkin.training.non_finite import NonFiniteSteps, Verdict
from napkin.training.preparation import Preparation
from napkin.training.signals import Interrupted


class MeteredStep:
    """Trains on the batch of the loop's next step."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        """Seconds of all steps but the metered one."""
        self.metered: StepMeasurement | None = None
        self.ranks: list[RankSeconds] = []
        """Every rank's bytes and seconds; empty in a single process, and before they were measured."""
        self.straggler: int | None = None
        """The rank for which the others waited."""
        self._process = psutil.Process()

    def __call__(self, loop: TrainingLoop) -> StepMetrics:
        """Take the step. Raises Interrupted where a signal interrupts it, NapkinError where the loss is not finite."""
        begin, train_state = time.perf_counter(), loop.train_state
        with loop.watch("data"):
            batch = self._batch(loop)
            weights = train_state.micro_batch_weights(batch[1]) if loop.ranks.world_size > 1 else None
        verdict = Verdict()
        try:
            self._watched_step(loop, batch, weights, verdict)
        except Interrupted:
            train_state.optimizer.zero_grad(set_to_none=True)
            raise
        skipped = None
        if not verdict.is_fit:
            non_finite = NonFiniteSteps(train_state, loop.history, loop.run, loop.on_message)
            skipped = non_finite.skip_or_stop(loop.step, batch, verdict)
        step_seconds = time.perf_counter() - begin
        learning_rate = train_state.learning_rate(loop.step)
        expert_tokens, dropped_tokens = train_state.expert_tokens()
        loop.step += 1
        tokens_per_step = loop.recipe.tokens_per_step
        tokens = loop.step * tokens_per_step
        return StepMetrics(
            step=loop.step,
            tokens=tokens,
            loss=verdict.loss,
            learning_rate=learning_rate,
            gradient_norm=verdict.gradient_norm,
            seconds=loop.seconds,
            step_seconds=step_seconds,
            tokens_per_second=tokens_per_step / step_seconds,
            mfu=loop.mfu(step_seconds),
            bytes=self._bytes(loop.device_type),
            spike=None if skipped else loop.history.add_loss(verdict.loss),
            skipped=skipped,
            expert_tokens=expert_tokens,
            dropped_tokens=dropped_tokens,
            epochs=_train_tokens(loop).epochs(tokens),
        )

    def _batch(self, loop: TrainingLoop) -> Batch:
        loop.reading_batch = True
        with loop.guarded(_train_tokens(loop)):
            batch = loop.fetcher[loop.step]
        loop.reading_batch = False
        return batch

    def _watched_step(self, loop: TrainingLoop, batch: Batch, weights: list[float] | None, verdict: Verdict) -> None:
        done, train_state = loop.step - loop.first_step, loop.train_state
        begin = time.perf_counter()
        metered = self._metered_number(loop)
        if loop.ranks.world_size > 1 and self.metered is not None and done == METERED_STEP + 1:
            with loop.watch("metering"):
                self._time_ranks(loop, batch, weights, verdict)
            return
        if done != metered:
            watch = loop.watch
            if loop.ranks.world_size == 1:
                micro_batches = len(batch[0]) // loop.recipe.training.resolved_micro_batch_size
                watch = loop.interruption.giving_up_long_steps(watch, micro_batches)
            train_state.step(loop.step, *batch, weights=weights, watch=watch, is_fit=verdict)
            self.step_seconds.append(time.perf_counter() - begin)
            return
        with loop.watch("metering"):
            self._meter(loop, loop.step, batch, weights, verdict)

    def _time_ranks(self, loop: TrainingLoop, batch: Batch, weights: list[float] | None, verdict: Verdict) -> None:
        """Time the collectives of a step on every rank; a collective."""
        assert self.metered is not None
        clock = CollectiveClock()
        with clock.timing():
            loop.train_state.step(loop.step, *batch, weights=weights, is_fit=verdict)
        self.step_seconds.append(clock.seconds)
        info = loop.ranks.info
        # Processes on one machine have one clock. Others begin to count when all have reached the same point.
        loop.ranks.all_reduce_max(0)
        offset = 0.0 if info.local_world_size == info.world_size else time.perf_counter()
        everyone = loop.ranks.all_gather(told(clock, self.metered.peak_bytes, offset))
        pipelined = loop.train_state.parallel_model.layout.pipeline > 1
        self.ranks, self.straggler = seconds_of_ranks(everyone, pipelined=pipelined)

    def _metered_number(self, loop: TrainingLoop) -> int | None:
        """Which of this process's steps is metered."""
        last = loop.recipe.training.steps - loop.first_step - 1
        if last > 0:
            return min(METERED_STEP, last)
        # A single step is timed: metering slows it down. Where earlier processes have timed theirs, it is metered.
        return 0 if loop.first_step and not (loop.run.path / MEASUREMENT_FILE).exists() else None

    def _meter(
        self, loop: TrainingLoop, number: int, batch: Batch, weights: list[float] | None, verdict: Verdict
    ) -> None:
        train_state = loop.train_state
        self.metered = meter_step(
            train_state.model,
            lambda: train_state.step(number, *batch, weights=weights, is_fit=verdict),
            device_type=loop.device_type,
            resident=train_state.resident(),
        )

    def meter_discarded(self, loop: TrainingLoop) -> None:
        """Meter the run's last step once more, when all steps are done; the train state has to be restored then."""
        with loop.guarded(_train_tokens(loop)):
            batch = loop.fetcher[loop.step - 1]
        weights = loop.train_state.micro_batch_weights(batch[1]) if loop.ranks.world_size > 1 else None
        self._meter(loop, loop.step - 1, batch, weights, Verdict())

    def _bytes(self, device_type: str) -> int:
        return torch.cuda.max_memory_allocated() if device_type == "cuda" else self._process.memory_info().rss

    def measurement(self, loop: TrainingLoop) -> Measurement | None:
        """The measurements of this process's steps; None where none was metered, or none timed.

        Where this process has timed no step, the seconds are those that earlier processes have logged.
        """
        plan = loop.preparation.plan
        if plan is None or self.metered is None:
            return None
        step_seconds = self.step_seconds or _logged_seconds(loop)
        if not step_seconds:
            return None
        median, seconds = statistics.median(step_seconds), sum(step_seconds)
        is_trained_here = loop.step > loop.first_step
        return Measurement(
            parameters=sum(parameter.numel() for parameter in loop.train_state.model.parameters()),
            flops=self.metered.ledger.flops,
            peak_bytes=self.metered.peak_bytes,
            seconds_per_step=median,
            seconds=loop.seconds if is_trained_here else loop.seconds_before,
            steps=loop.step - loop.first_step if self.step_seconds else len(step_seconds),
            mfu=mfu(plan.ledger, seconds, plan.site.matmul_peak, steps=len(step_seconds)),
            hfu=hfu(plan.ledger, seconds, plan.site.matmul_peak, steps=len(step_seconds)),
            seconds_by_part=loop.seconds_by_part() if is_trained_here else {},
            validation_loss=dict(loop.history.validation_losses).get(loop.recipe.training.steps),
        )


def _train_tokens(loop: TrainingLoop) -> TokenMixture:
    assert isinstance(loop.preparation, Preparation)
    return loop.preparation.train_tokens


def _logged_seconds(loop: TrainingLoop) -> list[float]:
    """Seconds of the steps in metrics.jsonl that earlier processes have made."""
    # The last of all may be this process's, which was metered.
    last = min(loop.first_step, loop.recipe.training.steps - 1)
    logged = (line for line in read_metrics_record(loop.run.path / METRICS_FILE).metrics if line.step <= last)
    return [line.step_seconds for line in logged if line.step_seconds > 0]
