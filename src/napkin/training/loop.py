"""The training loop: steps, callbacks around them, and an orderly end however it comes.

What a step is, and what is done around it, the loop is told: pre-training, fine-tuning and reinforcement learning
differ in `take_step`.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from napkin.accounting.metering import Stopwatch
from napkin.accounting.utilisation import mfu
from napkin.checkpoint.sharded_writer import restore_on_ranks
from napkin.data.mixing import TokenMixture
from napkin.data.prefetch import open_fetcher
from napkin.data.token_file import TokenFile
from napkin.data.token_guard import TokenGuard
from napkin.errors import CorruptFile
from napkin.hardware.malloc import keep_freed_memory
from napkin.recipe.recipe import Recipe
from napkin.runs.history import History
from napkin.runs.metrics import StepMetrics, format_metrics, parse_metrics
from napkin.runs.run_folder import RunFolder
from napkin.train_step.step import build_train_state
from napkin.training.compile_first import compile_first
from napkin.training.lost_pages import leaving_on_lost_pages
from napkin.training.preparation import Preparation
from napkin.training.signals import Interrupted, Interruption, agree_on_signal

Step = Callable[["TrainingLoop"], StepMetrics]
"""Does the step that the loop is at, and counts it; raises Interrupted where a signal makes it give that up."""


class Callback:
    """Called around the steps of a run; what a subclass leaves out does nothing."""

    def on_start(self, loop: "TrainingLoop") -> None:
        """The run's state is restored, or new; no step of this process is done."""

    def running(self, loop: "TrainingLoop") -> AbstractContextManager:
        """A context around all steps; left when they have ended, however that comes."""
        return ExitStack()

    def before_step(self, loop: "TrainingLoop") -> None:
        """A step is about to begin: the place to raise what has failed in the background."""

    def after_step(self, loop: "TrainingLoop", metrics: StepMetrics) -> StepMetrics:
        """A step is done; returns its metrics, with what this callback adds.

        Raises Interrupted where a signal makes it give up: a resumed run does it again.
        """
        return metrics

    def on_end(self, loop: "TrainingLoop") -> None:
        """No step of this process follows."""


class TrainingLoop:
    """The state of a run in this process, as its step and its callbacks see it."""

    def __init__(
        self,
        preparation: Preparation,
        run: RunFolder,
        on_message: Callable[[str], None],
        interruption: Interruption,
        take_step: Step,
    ) -> None:
        self.preparation, self.run, self.on_message, self.interruption = preparation, run, on_message, interruption
        self.recipe: Recipe = preparation.recipe
        self.ranks = preparation.ranks
        self.device_type = preparation.precision.device_type
        assert self.recipe.training.threads is not None
        torch.set_num_threads(self.recipe.training.threads)
        keep_freed_memory()
        compiled = self.recipe.training.compile == "on"
        self.train_state = build_train_state(preparation.resolved, self.ranks, compiled=compiled)
        self.fetcher = open_fetcher(preparation.batches, self.device_type, self.recipe.data.prefetch)
        self.watch = Stopwatch(self.device_type)
        self.history = History()
        self.callbacks: Sequence[Callback] = ()
        self.step = self.first_step = 0
        """Updates done, by all processes and before this one began."""
        self.take_step = take_step
        self.reading_batch = False
        """Whether a batch is being read now: the train state is whole then."""
        self._guards = {tokens: TokenGuard(tokens) for tokens in self._token_files()}
        self._seconds_before = 0.0
        self._start = time.perf_counter()

    def run_to_end(self) -> None:
        """Restore the run, and take its remaining steps, or those until a signal."""
        self._restore()
        compile_first(self.train_state, self.preparation, self.watch, self.interruption, self.on_message)
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.running(self))
            stack.enter_context(leaving_on_lost_pages(self._last_words))
            stack.enter_context(contextlib.closing(self.fetcher))
            while self.is_unfinished and agree_on_signal(self.ranks, self.interruption) is None:
                self._advance()
            self._finish()
        if not self.is_unfinished:
            self.interruption.signal = None

    def _restore(self) -> None:
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
            self.step, self._seconds_before = checkpoint.state.step, checkpoint.state.seconds
            self.history = checkpoint.state.history.copy()
        self._start = time.perf_counter()
        self.first_step = self.step
        for callback in self.callbacks:
            callback.on_start(self)

    @property
    def is_unfinished(self) -> bool:
        """Whether a step is to be done, or the evaluation after the last one."""
        return self.step < self.recipe.training.steps or self.history.unfinished is not None

    @property
    def seconds(self) -> float:
        """Of training so far, time between a kill and a resume left out."""
        return self._seconds_before + time.perf_counter() - self._start

    def seconds_by_part(self) -> dict[str, float]:
        """Of this process, what each timed part took, and all that is part of none."""
        parts = dict(self.watch.seconds)
        return {**parts, "other": time.perf_counter() - self._start - sum(parts.values())}

    def mfu(self, step_seconds: float) -> float:
        """Model-FLOPs utilisation of a step that took so long; NaN on ranks that have no plan."""
        plan = self.preparation.plan
        return math.nan if plan is None else mfu(plan.ledger, step_seconds, plan.site.matmul_peak)

    def _advance(self) -> None:
        """Do one step and what is due after it, as far as no signal prevents it."""
        for callback in self.callbacks:
            callback.before_step(self)
        unfinished = self.history.unfinished
        with contextlib.suppress(Interrupted):
            metrics = self.take_step(self) if unfinished is None else parse_metrics(unfinished)
            # Until it is logged, a checkpoint says that the step is to be finished.
            self.history.unfinished = format_metrics(metrics)
            for callback in self.callbacks:
                metrics = callback.after_step(self, metrics)

    def _finish(self) -> None:
        for callback in self.callbacks:
            callback.on_end(self)

    def _token_files(self) -> list[TokenFile | TokenMixture]:
        files = (self.preparation.train_tokens, self.preparation.validation_tokens)
        return [tokens for tokens in files if tokens is not None]

    @contextmanager
    def guarded(self, tokens: TokenFile | TokenMixture) -> Iterator[None]:
        """Read tokens that are, before and after, those that were checked; if not, leave a checkpoint and raise."""
        try:
            self._guards[tokens].verify_unchanged()
            yield
            self._guards[tokens].verify_unchanged()
        except CorruptFile as error:
            if self.ranks.world_size > 1:
                # The other ranks know nothing of it, and a checkpoint needs all of them.
                raise
            self._finish()
            raise CorruptFile(f"{error}; nothing was learned from it, step {self.step} is saved") from None

    def _last_words(self) -> str:
        """What to say when pages of a mapped file are lost; a checkpoint is left where the train state is whole."""
        files = " or ".join(f"'{file.path}'" for guard in self._guards.values() for file in guard.files)
        line = f"{files} was shortened, or its disk has gone, while the run read it: put it back and continue with "
        line += f"`napkin resume {self.run.path}`; "
        if not self.reading_batch or self.ranks.world_size > 1:
            return line + "earlier checkpoints are kept"
        self._finish()
        return f"{line}nothing was learned from it, step {self.step} is saved"
