"""The training loop: restores a run, takes its steps, calls the callbacks, and ends with a checkpoint.

The step and the callbacks are parameters of the loop: another kind of training has another `take_step`. Compiled blocks
are compiled before the first step, so that compilation is timed apart from the steps. `Preparation` is what the loop
needs of any kind of training: files are opened and verified, no model is allocated yet.
"""

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from napkin.accounting.metering import Stopwatch
from napkin.accounting.pricing import mfu
from napkin.checkpoint.folder import checkpoint_paths
from napkin.checkpoint.sharded_writer import restore_on_ranks
from napkin.checkpoint.state import frozen_checksum, frozen_tensors
from napkin.data.lost_pages import leaving_on_lost_pages
from napkin.data.mixing import TokenGuard, TokenMixture
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.hardware.host import keep_freed_memory
from napkin.planning.step.run_plan import Plan
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.runs.metrics import History, StepMetrics, format_metrics, parse_metrics
from napkin.runs.run_folder import RunFolder
from napkin.tensors import random_state_kept
from napkin.tokenizer.base import Tokenizer
from napkin.torch_compile import compiled_folder, stoppable_compiler
from napkin.train_step.step import Initialize, TrainState, build_train_state
from napkin.train_step.step_graph import record_cuda_graph
from napkin.training.signals import Interrupted, Interruption, agree_on_signal
from napkin.units import format_seconds


@dataclass(eq=False)
class Preparation(ABC):
    """A run that is ready to be trained; `napkin.training.method` adds how its steps are taken."""

    resolved: ResolvedRecipe
    """The recipe with every default written out that depends on this machine or on files."""
    tokenizer: Tokenizer
    ranks: Ranks = field(default=ALONE, kw_only=True)
    plan: Plan | None = field(default=None, kw_only=True)
    """Made by rank 0; the other ranks have none."""

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def precision(self) -> Precision:
        return self.resolved.precision

    @property
    @abstractmethod
    def data_checksum(self) -> str:
        """The checksum of the training data, which a checkpoint remembers."""

    @property
    def token_files(self) -> list[TokenFile | TokenMixture]:
        """The files that are mapped while the run trains."""
        return []

    @property
    def initialize(self) -> Initialize | None:
        """Sets the weights of a new run, where they are not drawn from training.init_seed."""
        return None


SILENT_SECONDS = 2.0
"""A compilation that takes longer is announced."""

Step = Callable[["TrainingLoop"], StepMetrics]
"""Takes the loop's next step and increments `loop.step`. Raises Interrupted where a signal interrupts it."""


class Callback:
    """Methods that are called around the steps of a run; by default they do nothing."""

    def on_start(self, loop: "TrainingLoop") -> None:
        """Called when the run's state is restored, or new, before the first step of this process."""

    def running(self, loop: "TrainingLoop") -> AbstractContextManager:
        """A context manager around all steps, which is left when they end, also by an exception."""
        return ExitStack()

    def before_step(self, loop: "TrainingLoop") -> None:
        """Called before each step; raises errors of background work."""

    def after_step(self, loop: "TrainingLoop", metrics: StepMetrics) -> StepMetrics:
        """Called after each step. Returns its metrics, with what this callback adds to them.

        Raises Interrupted where a signal interrupts it; a resumed run calls it again.
        """
        return metrics

    def on_end(self, loop: "TrainingLoop") -> None:
        """Called after the last step of this process."""


class TrainingLoop:
    """The state of a run in this process, for its step and its callbacks."""

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
        recorder = record_cuda_graph if self.recipe.training.cuda_graphs == "on" else None
        begins = not checkpoint_paths(run.checkpoints)
        initialize = preparation.initialize if begins else None
        self.train_state = build_train_state(
            preparation.resolved,
            self.ranks,
            compiled=compiled,
            recorder=recorder,
            initialize=initialize,
            drawn=begins,
        )
        self.watch = Stopwatch(self.device_type)
        self.history = History()
        self.callbacks: Sequence[Callback] = ()
        self.step = self.first_step = 0
        """Updates done in all, and before this process."""
        self.take_step = take_step
        self.reading_batch = False
        """True while a batch is read: the train state is consistent then."""
        self._guards = {tokens: TokenGuard(tokens) for tokens in preparation.token_files}
        self.frozen: str | None = None
        """The checksum of the run's frozen weights; None where all are trained."""
        self.seconds_before = 0.0
        """Seconds of training up to the checkpoint that this process has continued from."""
        self._start = time.perf_counter()

    def run_to_end(self) -> None:
        """Restore the run, and take its remaining steps, or those until a signal arrives."""
        self._restore()
        _compile_first(self.train_state, self.preparation, self.watch, self.interruption, self.on_message)
        with contextlib.ExitStack() as stack:
            stack.enter_context(leaving_on_lost_pages(self._last_words))
            for callback in self.callbacks:
                stack.enter_context(callback.running(self))
            while self.is_unfinished and agree_on_signal(self.ranks, self.interruption) is None:
                self._advance()
            self._finish()
        if not self.is_unfinished:
            self.interruption.signal = None

    def _restore(self) -> None:
        """Restore the newest intact checkpoint, if there is one."""
        checkpoint = restore_on_ranks(
            self.ranks,
            self.run.checkpoints,
            self.train_state,
            tokenizer=self.preparation.tokenizer.fingerprint,
            train_tokens=self.preparation.data_checksum,
            on_message=self.on_message,
        )
        if checkpoint is not None:
            self.step, self.seconds_before = checkpoint.state.step, checkpoint.state.seconds
            self.history = checkpoint.state.history.copy()
            self.frozen = checkpoint.frozen
        elif frozen_tensors(self.train_state.model):
            self.frozen = frozen_checksum(self.run.checkpoints)
        self._start = time.perf_counter()
        self.first_step = self.step
        for callback in self.callbacks:
            callback.on_start(self)

    @property
    def is_unfinished(self) -> bool:
        """True if a step remains, or the evaluation after the last one."""
        return self.step < self.recipe.training.steps or self.history.unfinished is not None

    @property
    def evaluation_is_due(self) -> bool:
        training = self.recipe.training
        return self.step == training.steps or self.step % training.evaluate_every == 0

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without the time between a kill and a resume."""
        return self.seconds_before + time.perf_counter() - self._start

    def seconds_by_part(self) -> dict[str, float]:
        """Seconds of each timed part of this process; "other" is the rest."""
        parts = dict(self.watch.seconds)
        return {**parts, "other": time.perf_counter() - self._start - sum(parts.values())}

    def mfu(self, step_seconds: float, planned_steps: float = 1) -> float:
        """Model-FLOPs utilisation of a step of `step_seconds` that has the FLOPs of so many planned ones; NaN on ranks
        without a plan."""
        plan = self.preparation.plan
        if plan is None:
            return math.nan
        return mfu(plan.ledger, step_seconds, plan.site.matmul_peak, steps=planned_steps)

    def _advance(self) -> None:
        """Take one step and call the callbacks, unless a signal interrupts them."""
        for callback in self.callbacks:
            callback.before_step(self)
        unfinished = self.history.unfinished
        with contextlib.suppress(Interrupted):
            metrics = self.take_step(self) if unfinished is None else parse_metrics(unfinished)
            # A checkpoint that is written before the step is logged marks it as unfinished.
            self.history.unfinished = format_metrics(metrics)
            for callback in self.callbacks:
                metrics = callback.after_step(self, metrics)

    def _finish(self) -> None:
        for callback in self.callbacks:
            callback.on_end(self)

    @contextmanager
    def guarded(self, tokens: TokenFile | TokenMixture) -> Iterator[None]:
        """Verify before and after the block that the tokens have not changed; otherwise save a checkpoint and raise."""
        try:
            self._guards[tokens].verify_unchanged()
            yield
            self._guards[tokens].verify_unchanged()
        except CorruptFile as error:
            if self.ranks.world_size > 1:
                # A checkpoint needs all ranks, and the others have not noticed.
                raise
            self._finish()
            raise CorruptFile(f"{error}; nothing was learned from it, step {self.step} is saved") from None

    def _last_words(self) -> str:
        """The last message when pages of a mapped file are lost; saves a checkpoint if the train state is
        consistent."""
        files = " or ".join(f"'{file.path}'" for guard in self._guards.values() for file in guard.files)
        line = f"{files} was shortened, or its disk has gone, while the run read it: put it back and continue with "
        line += f"`napkin resume {self.run.path}`; "
        if not self.reading_batch or self.ranks.world_size > 1:
            return line + "earlier checkpoints are kept"
        self._finish()
        return f"{line}nothing was learned from it, step {self.step} is saved"


def _compile_first(
    train_state: TrainState,
    preparation: Preparation,
    watch: Stopwatch,
    interruption: Interruption,
    on_message: Callable[[str], None],
) -> None:
    """Compile the train state's blocks if they are to be, timed as "compiling".

    The random state is unchanged. A signal stops the compiler. Raises NapkinError where the compiler fails.
    """
    if not train_state.compiled:
        return
    from torch._dynamo.exc import TorchDynamoException

    plan = preparation.plan
    about = "" if plan is None else f", about {format_seconds(plan.compile_estimate.seconds)}"
    line = f"compiling the model's blocks{about}; the result is cached for runs of the same shape"
    announcement = threading.Timer(SILENT_SECONDS, on_message, [line])
    announcement.daemon = True
    announcement.start()
    try:
        with (
            stoppable_compiler() as stop,
            interruption.ending(stop),
            watch("compiling"),
            random_state_kept(preparation.precision.device_type),
        ):
            interruption.give_up()
            train_state.warm_up(preparation.resolved.per_device.training.batch_size)
    except (Interrupted, KeyboardInterrupt, TorchDynamoException) as error:
        if interruption.signal is not None:
            train_state.optimizer.zero_grad(set_to_none=True)
        elif isinstance(error, TorchDynamoException):
            # The compiler's first line with an error, if torch quotes it.
            output = str(error).partition("Output:")[2].splitlines()
            why = next((line.strip() for line in output if "error" in line), first_line(error))[:200]
            raise NapkinError(
                f"the model's blocks cannot be compiled ({why}): remove '{compiled_folder()}' if what "
                'was kept there is damaged, or set compile = "off" under [training] in the run\'s recipe.toml; and '
                "continue with `napkin resume`"
            ) from error
        else:
            raise
    finally:
        announcement.cancel()
