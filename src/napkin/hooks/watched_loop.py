"""A training loop of one's own, watched: planned before its first step, metered while it runs, reconciled at its end.

    with napkin.watch(model, optimizer, run="runs/mine") as watched:
        for batch in watched.data(loader):
            with watched.step(tokens=batch.numel()):
                loss = train_step(model, optimizer, batch)
            watched.log(loss=loss)
    print(watched)

The third step is recorded, operator by operator. All others cost a few readings of the clock. Where the sizes of
batches change, a step of a size that was not recorded yet is recorded too, as long as recording takes less than half a
percent of the run's time: so each step's FLOPs are those that were counted for its size, or it is in no MFU.
"""

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from napkin.accounting.collectives import CollectiveClock
from napkin.accounting.ledger import METERED_STEP, Ledger
from napkin.accounting.metering import metering
from napkin.accounting.quantities import Line, QuantityTable
from napkin.accounting.rank_seconds import step_report
from napkin.errors import NapkinError, first_line
from napkin.files import StrPath
from napkin.hardware.competition import Watch
from napkin.hooks.fake_step import Twins, count_fake_step, is_on_cuda, random_states_kept, signature_of, tokens_of
from napkin.hooks.loop_figures import LoopFigures, Spent, program_table
from napkin.hooks.program_plan import ProgramPlan, plan_step
from napkin.hooks.program_ranks import FAILED_PATIENCE_SECONDS, PATIENCE_SECONDS, seconds_by_rank
from napkin.hooks.program_run import ProgramRun, free_folder
from napkin.hooks.verdict import verdict
from napkin.planning.step.longest_step import LongestStep, find_longest
from napkin.planning.step.site import step_memory
from napkin.units import format_seconds, format_share

Batch = TypeVar("Batch")

RECORDING_SHARE = 0.005
"""The most of the run's time that recording further steps takes."""
MOST_SIZES = 64
"""The most sizes of batches that are recorded."""
SAMPLED_STEPS = 16
"""On CUDA, so many steps from the first on are timed between two waits for the device, and one per second later."""
SAMPLE_SECONDS = 1.0
LINE_SECONDS = 1.0
"""Metrics are written no more often, but at the end."""


class WatchedLoop(LoopFigures):
    """The figures of a loop so far; `watch` makes it, and hooks of trainers fill it."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        program: str = "loop",
        run: StrPath | None = None,
        steps: int | None = None,
        on: str | None = None,
        n_devices: int = 1,
        usd_per_hour: float | None = None,
        watts: float | None = None,
        settings: Mapping[str, Any] | None = None,
        say: Callable[[str], Any] | None = print,
    ) -> None:
        parameters = list(module.parameters())
        devices = {parameter.device.type for parameter in parameters} or {"cpu"}
        if not devices <= {"cpu", "cuda"}:
            raise NapkinError(f"watch: the module is on {', '.join(sorted(devices))}: only CPU and CUDA can be metered")
        super().__init__(module)
        self._clock: CollectiveClock | None = None
        self._optimizer = optimizer
        self.device = torch.device("cuda" if "cuda" in devices else "cpu")
        self.longest: LongestStep | None = None
        """The step that takes most memory; None if unknown, or if all steps are equal."""
        self._watch: Watch | None = None
        self._planned_steps, self._on, self._n_devices = steps, on, n_devices
        self._usd_per_hour, self._watts, self._say = usd_per_hour, watts, say
        self._boundary = time.perf_counter()
        self._step_begin: float | None = None
        self._waited = self._named = 0.0
        self._recording = ExitStack()
        self._records = True
        self._is_recorded = self._is_sampled = False
        self._step_processor = 0.0
        self._size: Hashable = None
        self._last: tuple[float, int, Hashable] = (0.0, 0, None)
        self._next_sample = 0.0
        self._metrics: dict[str, float] = {}
        self._line_due = 0.0
        if self.ranks.rank:
            run = self._say = None
        self._run = None if run is None else ProgramRun.create(run, program, self, settings or {})

    # The methods that a loop calls

    def plan_step(self, step: Callable[[Any, Any, Any], Any], batch: Any) -> ProgramPlan | None:
        """Plan `step(model, optimizer, batch)` before the first step: on fake twins of all three.

        None, with `obstacle` saying why, where the step cannot be traced; the loop goes on, and is metered. Rank 0
        plans; for the other ranks it is None.
        """

        return self.plan_by(lambda: self._counted(step, batch), size=signature_of(batch), tokens=tokens_of(batch))

    def plan_longest(
        self,
        step: Callable[[Any, Any, Any], Any],
        sizes: Sequence[tuple[int, int]],
        batch_of: Callable[[int], Any],
    ) -> LongestStep | None:
        """Find the step that takes most memory, and the first that would run out of it, behind `plan_step`.

        Args:
            step: as in `plan_step`, whose batch is that of step 0.
            sizes: rows and length of the batch of each step, in the order of the run.
            batch_of: the batch of a step by its number, from 0; called for the few that are counted.
        """

        def find(step_bytes: int, first_peak: int) -> LongestStep | None:
            if len(set(sizes)) < 2:
                return None
            return find_longest(
                [(rows * length, rows * length**2) for rows, length in sizes],
                lambda number: self._counted(step, batch_of(number)).peak_bytes,
                lambda number: f"{sizes[number][0]} × {sizes[number][1]:,} tokens",
                step_bytes=step_bytes,
                known={0: first_peak},
            )

        return self.longest_by(find)

    def _counted(self, step: Callable[[Any, Any, Any], Any], batch: Any) -> Ledger:
        twins = Twins()
        module = twins.of_module(self.module)
        optimizer: Any = self._optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer = twins.of_optimizer(optimizer)
        elif optimizer is not None:
            optimizer = [twins.of_optimizer(each) for each in optimizer]
        on_cuda = is_on_cuda(self.module.parameters())
        return count_fake_step(
            twins, module, lambda batches: step(module, optimizer, batches[0]), [batch], on_cuda=on_cuda
        )

    def data(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, one after the other; the seconds until each is there are those of waiting for data."""
        workers = getattr(batches, "num_workers", None)
        self.n_workers = workers if isinstance(workers, int) else self.n_workers
        iterator = iter(batches)
        while True:
            with self.waiting():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for data."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - begin

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block is neither a step nor data: an evaluation, a checkpoint."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add_part(name, time.perf_counter() - begin)

    @contextmanager
    def step(self, *, tokens: int = 0, size: Hashable = None) -> Iterator[None]:
        """The block is one step: all micro-batches up to the update.

        Args:
            tokens: those that it trains on, for tokens per second.
            size: equal for steps that do the same work; None is the number of tokens.
        """
        self.begin_step(tokens if size is None else size)
        try:
            yield
        except BaseException as error:
            self.abort_step(error)
            raise
        self.end_step(tokens)

    def log(self, **metrics: Any) -> None:
        """Figures of the last step for the run's folder: `loss`, `learning_rate`, `gradient_norm`, `validation_loss`.

        A tensor is read only when a line is written, at most once per second.
        """
        self._metrics.update(metrics)
        self._write_line()

    def end(self, *, failed: bool = False) -> None:
        """The loop is over; `watch` calls this at the end of its block. Writes the run's measurement and report.

        A loop that has `failed` does not wait long for the other ranks, which may never get there.
        """
        if self._end is not None:
            return
        self.abort_step(None)
        self._end = time.perf_counter()
        if self._watch is not None:
            self.conditions = self._watch.conditions(idle=bool(self.n_workers))
        self._gather_ranks(FAILED_PATIENCE_SECONDS if failed else PATIENCE_SECONDS)
        if self._run is not None:
            self._write_line(last=True)
            self._run.finish(self)

    # Called by hooks of trainers and by the methods above

    def plan_by(self, count_it: Callable[[], Ledger], *, size: Hashable, tokens: int) -> ProgramPlan | None:
        """Plan the step that `count_it` counts, and price it on the device."""
        if self.ranks.rank:
            return None
        begin = time.perf_counter()
        try:
            with random_states_kept(), self.ranks.not_talking():
                self.plan = plan_step(
                    count_it(),
                    device_type="cuda" if self.device.type == "cuda" else "cpu",
                    on=self._on,
                    n_devices=self._n_devices,
                    tokens=tokens,
                    steps=self._planned_steps,
                    usd_per_hour=self._usd_per_hour,
                    watts=self._watts,
                )
                self._planned_size = size
        except Exception as error:  # whatever a program's step does: watching it must not end it
            self.obstacle = first_line(error)
        if self._run is not None and self.plan is not None:
            self._run.write_plan(self.plan)
        if self._say is not None:
            self._say(self.plan.headline() if self.plan else f"napkin: the step is not planned: {self.obstacle}")
        seconds = time.perf_counter() - begin
        self.spent.planning += seconds
        self._named += seconds
        return self.plan

    def longest_by(self, find: Callable[[int, int], LongestStep | None]) -> LongestStep | None:
        """Find the step that takes most memory, behind a plan: `find` is given the bytes that a step may take, and the
        peak of the first one. None where there is no plan, all steps are alike, or their batches are not known."""
        if self.plan is None:
            return None
        begin = time.perf_counter()
        ledger = self.plan.ledger
        # The memory that the process already uses is part of the step, and not of the free memory.
        step_bytes = step_memory(self.plan.site.memory_bytes) + ledger.trained_bytes
        # Watching a program must not end it.
        with contextlib.suppress(Exception), random_states_kept(), self.ranks.not_talking():
            self.longest = find(step_bytes, ledger.peak_bytes)
        if self.longest is not None and self._say is not None:
            self._say(f"napkin: {self.longest.sentence()}")
        seconds = time.perf_counter() - begin
        self.spent.planning += seconds
        self._named += seconds
        return self.longest

    def begin_step(self, size: Hashable) -> None:
        if self._end is not None:
            raise NapkinError("watch: the loop has ended: put the step inside of `with napkin.watch(...)`")
        if self._step_begin is not None:
            raise NapkinError("watch: a step inside a step: put all micro-batches of an update into one step")
        self._is_sampled = self.device.type != "cuda" or self.steps < SAMPLED_STEPS or self._sample_is_due()
        self._synchronize()
        self._close_gap(time.perf_counter())
        self._size = size
        self._is_recorded = self._shall_record(size)
        if self._is_recorded:
            self._begin_recording(metering(self.module, partial(self.recorded.setdefault, size), device=self.device))
        elif self.ranks.world_size > 1 and self.recorded and self._clock is None and not _profiles():
            # All ranks do this in the same step.
            self._clock, self._is_recorded = CollectiveClock(self.device.type), True
            self._begin_recording(self._clock.timing())
        self._step_processor = time.thread_time()
        self._step_begin = time.perf_counter()

    def end_step(self, tokens: int = 0) -> None:
        if self._step_begin is None:
            return
        if self._is_recorded:
            self._end_recording(None)
        self._synchronize()
        now = time.perf_counter()
        waited, self._waited = self._waited, 0.0
        # Time in a named part inside of the step belongs to no other part.
        seconds = now - self._step_begin - waited - self._named
        self.spent.data += waited
        self._named = 0.0
        if self._is_recorded:
            self.spent.recorded += now - self._boundary - waited
        else:
            self.spent.steps += seconds
            if self._is_sampled:
                self.step_seconds[self._size].append(seconds)
                self.processor_seconds[self._size].append(time.thread_time() - self._step_processor)
        self._boundary, self._step_begin = now, None
        self.steps += 1
        self.tokens += tokens
        self._last = (seconds, tokens, self._size)

    def abort_step(self, error: BaseException | None) -> None:
        """The step raised `error`, or nobody ended it: it is not counted, and its recorder lets go of operators."""
        if self._step_begin is not None:
            self._end_recording(error or NapkinError("the step did not end"))
            self._step_begin = None

    def add_waiting(self, seconds: float) -> None:
        self._waited += seconds

    def add_part(self, name: str, seconds: float) -> None:
        self.spent.other[name] += seconds
        self._named += seconds

    @property
    def run(self) -> Path | None:
        """The run's folder; None where none is written."""
        return None if self._run is None else self._run.path

    def table(self) -> QuantityTable:
        """Rule, count and meter, side by side."""
        return program_table(self)

    def verdict(self) -> list[str]:
        """Return the verdict, in sentences."""
        return verdict(self)

    def report_lines(self) -> list[str]:
        """The table, the verdict and where the page is, for a terminal."""
        wrote = [] if self.run is None else [f"wrote {self.run / 'report.html'}"]
        return [str(self.table()), *(f"napkin: {said}" for said in (*self.verdict(), *wrote))]

    def summary(self) -> Iterator[Line]:
        yield "WatchedLoop", f"{self.steps:,} steps of {self.parameters:,} parameters in {format_seconds(self.seconds)}"
        spent = self.spent
        named = {"steps": spent.steps, "data": spent.data, "recorded steps": spent.recorded, "planning": spent.planning}
        parts = {**named, **spent.other}
        yield "seconds", "; ".join(f"{name} {format_seconds(value)}" for name, value in parts.items() if value)
        if self.mfu is not None:
            yield "MFU", format_share(self.mfu)
        if self.obstacle:
            yield "not planned", self.obstacle
        for sentence in self.verdict():
            yield "verdict", sentence
        if self._run is not None:
            yield "run", str(self._run.path)

    def _close_gap(self, now: float) -> None:
        """Name the time between two steps that no part of the loop has claimed "between steps"."""
        if self.steps:
            self.spent.other["between steps"] += max(0.0, now - self._boundary - self._waited - self._named)
            self.spent.data += self._waited
        else:
            # Time before the first step, its plan and its first batch counts as the start of the program.
            self._begin = now
            self._watch = Watch() if self.device.type == "cpu" else None
            self.spent = Spent(planning=self.spent.planning)
        self._named = self._waited = 0.0
        self._boundary = now

    def _sample_is_due(self) -> bool:
        if time.perf_counter() < self._next_sample:
            return False
        self._next_sample = time.perf_counter() + SAMPLE_SECONDS
        return True

    def _synchronize(self) -> None:
        """Wait for the device around a step whose seconds are taken; all others are left to run ahead of it."""
        if self._is_sampled and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # Watching must not end the program: where recording fails, the loop goes on without it.

    def _begin_recording(self, by: AbstractContextManager[Any]) -> None:
        try:
            self._recording.enter_context(by)
        except Exception as error:
            self._refuse_recording(error)

    def _end_recording(self, error: BaseException | None) -> None:
        """End the recording of a step; if `error` ended the step, the recording is discarded."""
        try:
            if error is None:
                self._recording.close()
            else:
                self._recording.__exit__(type(error), error, error.__traceback__)
        except Exception as failure:
            if failure is not error:
                self._refuse_recording(failure)

    def _refuse_recording(self, error: Exception) -> None:
        self._records = False
        self.obstacle = self.obstacle or f"its steps cannot be recorded: {first_line(error)}"

    def _gather_ranks(self, patience: float) -> None:
        """Tell rank 0 of this rank's step; on rank 0, hear of the others'."""
        if self.ranks.world_size == 1:
            return
        measurement, clock = self.measurement, self._clock
        step = None
        if measurement is not None and clock is not None and clock.seconds:
            step = step_report(clock, measurement.peak_bytes)
            step["own_clock"] = self.device.type == "cuda" or not self.ranks.has_one_clock
        own = {"peak_bytes": None if measurement is None else measurement.peak_bytes, "steps": self.steps, "step": step}
        if self.ranks.rank:
            self.ranks.tell(own)
            return
        everyone = self.ranks.gather(own, patience=patience)
        self.rank_seconds, self.straggler = seconds_by_rank(everyone)
        self.rank_peaks = [each["peak_bytes"] for each in everyone if each["peak_bytes"] is not None]

    def _shall_record(self, size: Hashable) -> bool:
        if not self._records or self.steps < METERED_STEP or size in self.recorded or _profiles():
            return False
        if not self.recorded:
            return True
        return len(self.recorded) < MOST_SIZES and self.spent.recorded < RECORDING_SHARE * self.seconds

    def _write_line(self, *, last: bool = False) -> None:
        now = time.perf_counter()
        if self._run is None or not self.steps or (now < self._line_due and not last):
            return
        self._line_due = now + LINE_SECONDS
        seconds, tokens, size = self._last
        flops, peak = self.flops_of(size), self.plan.matmul_peak if self.plan else None
        figures = {name: _number(value) for name, value in self._metrics.items()}
        with contextlib.suppress(NapkinError):  # a full disk is no reason to stop training
            self._run.write_line(
                step=self.steps,
                tokens=self.tokens,
                seconds=now - self._begin,
                step_seconds=seconds,
                tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
                mfu=flops / seconds / peak if flops and peak and seconds > 0 else math.nan,
                figures=figures,
            )


def _profiles() -> bool:
    """True if a profiler of the program's own is running: there can be one at a time."""
    return torch._C._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


@contextmanager
def watch(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    run: StrPath | None = None,
    steps: int | None = None,
    on: str | None = None,
    n_devices: int = 1,
    usd_per_hour: float | None = None,
    watts: float | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[WatchedLoop]:
    """Watch the training loop in the block: each step goes into a `with watched.step():`.

    Args:
        module: what is trained, on a CPU or a CUDA device.
        optimizer: what updates it; needed for a plan alone.
        run: a new folder for plan, metrics, measurement and report, which `napkin runs` and `napkin report` read. None
            writes nothing.
        steps: how many are planned, for seconds and dollars of all of them.
        on: the device, as the catalogue names it; None is that of the module.
        n_devices: how many devices the price and the energy are for.
        usd_per_hour: the price of all devices; None is the catalogue's, for a device that is in it.
        watts: the power of all devices; None is the catalogue's.
        settings: anything that describes the run, for its recipe.toml.

    Raises NapkinError for a module on another device, and where `run` exists.
    """
    watched = WatchedLoop(
        module,
        optimizer,
        run=run,
        steps=steps,
        on=on,
        n_devices=n_devices,
        usd_per_hour=usd_per_hour,
        watts=watts,
        settings=settings,
        say=None,
    )
    try:
        yield watched
    except BaseException:
        with contextlib.suppress(NapkinError, OSError):  # the program's own error is the one that is raised
            watched.end(failed=True)
        raise
    watched.end()


class LoopHook:
    """Base of the trainers' hooks: their options, the loop that they fill, and what they print at its end."""

    def __init__(
        self,
        *,
        run: StrPath | None,
        plan: bool,
        on: str | None,
        usd_per_hour: float | None,
        watts: float | None,
        say: Callable[[str], Any] | None,
    ) -> None:
        self.watched: WatchedLoop | None = None
        """The figures; None before training begins."""
        self._run, self._plans, self._say = run, plan, say
        self._options: dict[str, Any] = {"on": on, "usd_per_hour": usd_per_hour, "watts": watts}
        self._part_begin = 0.0

    def _folder(self, name: str) -> Path | None:
        """The run's folder; that of a trainer that trains again, or anew after an error, is numbered."""
        if self._run is None:
            return None
        if self._run == "auto":
            return free_folder(Path("runs") / (name or "run"))
        return free_folder(Path(self._run)) if self.watched is not None else Path(self._run)

    def _fail(self) -> None:
        """Training ended with an error: what was measured until then is written."""
        if self.watched is not None:
            with contextlib.suppress(NapkinError, OSError):  # the trainer's own error is the one that is raised
                self.watched.end(failed=True)

    def _end(self) -> None:
        """End the loop, and say its table and verdict."""
        if self.watched is None:
            return
        self.watched.end()
        if self._say is not None and not self.watched.ranks.rank:
            for line in self.watched.report_lines():
                self._say(line)
