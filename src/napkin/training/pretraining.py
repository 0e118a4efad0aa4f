"""Pre-training: the next token of windows of text.

Start with `Pretraining`, the files of a run; `PretrainingStep` trains on a batch of windows, `Evaluation` reads the
validation tokens.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from napkin.data.batches import Batch, Batches, BatchFetcher, open_fetcher
from napkin.data.mixing import TokenMixture
from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError
from napkin.evaluation.bits_per_byte import EVALUATION_BATCH_SIZE, mean_loss
from napkin.planning.planner import resolve, with_text, with_vocab_size
from napkin.planning.step.run_plan import Plan
from napkin.recipe.mixture import open_mixture
from napkin.recipe.recipe import Recipe
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder, lower_learning_rate
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.train_step.step import Watch
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.metered_step import IsFit, MeteredStep
from napkin.training.method import Method, Setting


@dataclasses.dataclass(eq=False)
class Pretraining(Method):
    """A run of pre-training: its token files are opened and verified, its recipe is resolved."""

    train_tokens: TokenMixture
    validation_tokens: TokenFile | None

    @classmethod
    def begin(cls, recipe: Recipe, folder: Path, setting: Setting) -> "Pretraining":
        recipe.tracking.refuse_missing()
        if recipe.data.windows == "auto":
            recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, windows="shifted"))
        if not Path(recipe.data.tokenizer).is_file():
            raise NapkinError(
                f"there is no tokenizer file '{recipe.data.tokenizer}': make one with `napkin tokenizer train TEXT`, "
                "or name yours with --data.tokenizer"
            )
        return cls._opened(recipe, load_tokenizer(recipe.data.tokenizer), setting)

    @classmethod
    def reopen(cls, run: RunFolder, recipe: Recipe, setting: Setting) -> "Pretraining":
        """Open the token files; the run has a tokenizer of its own.

        Where the recipe leaves an option open, the run is older than that option and continues as it began: uncompiled,
        with plain kernels, its windows at the same places in every epoch.
        """
        recipe.tracking.refuse_missing()
        training, data = recipe.training, recipe.data
        training = dataclasses.replace(
            training,
            compile="off" if training.compile == "auto" else training.compile,
            kernels="plain" if training.kernels == "auto" else training.kernels,
        )
        data = dataclasses.replace(data, windows="fixed" if data.windows == "auto" else data.windows)
        return cls._opened(dataclasses.replace(recipe, training=training, data=data), run.tokenizer, setting)

    @classmethod
    def _opened(cls, recipe: Recipe, tokenizer: Tokenizer, setting: Setting) -> "Pretraining":
        setting.progress("checking the token files")

        def opened(path: str, way_out: str) -> TokenFile:
            if not Path(path).is_file():
                raise NapkinError(
                    f"there is no token file '{path}': make it with `napkin tokenizer encode TEXT`, {way_out}"
                )
            token_file = TokenFile.open(path, tokenizer_fingerprint=tokenizer.fingerprint)
            token_file.refuse_other_vocabulary(tokenizer)
            # Blocks are verified when they are read. A file without checksums of blocks is verified whole, by rank 0.
            if recipe.data.verify and token_file.verify_on_read():
                # Verifies the first block: a small file is refused before anything is planned or made.
                token_file.stretch(0, 1)
            elif recipe.data.verify and setting.ranks.is_rank_zero:
                token_file.verify()
            return token_file

        train_tokens = open_mixture(recipe, lambda path: opened(path, "or name yours with --data.train"))
        validation_tokens = None
        if recipe.data.validation is not None:
            way_out = "name yours with --data.validation, or do without: --data.validation None"
            validation_tokens = opened(recipe.data.validation, way_out)
        resolved = resolve(
            with_vocab_size(recipe, tokenizer.vocab_size), setting.machine(recipe), progress=setting.progress
        )
        # Raises NapkinError for a text shorter than one window, before anything is measured or counted.
        _batches(resolved.recipe, train_tokens)
        return cls(resolved, tokenizer, train_tokens, validation_tokens, ranks=setting.ranks)

    @property
    def batches(self) -> Batches:
        """The training batches in order; of each, this rank's rows."""
        rows = self.resolved.layout.rows(self.ranks.info.rank, self.recipe.training.batch_size)
        return _batches(self.recipe, self.train_tokens, rows)

    @property
    def data_checksum(self) -> str:
        return self.train_tokens.sha256

    @property
    def token_files(self) -> list[TokenFile | TokenMixture]:
        """The training tokens, and the validation tokens if there are any."""
        files = (self.train_tokens, self.validation_tokens)
        return [tokens for tokens in files if tokens is not None]

    def make_plan(self, setting: Setting) -> Plan:
        machine = setting.machine(self.recipe)
        return with_text(setting.planner(self.resolved, machine, progress=setting.progress), self.train_tokens)

    def step(self) -> "PretrainingStep":
        return PretrainingStep(self)

    def evaluation(self) -> "Evaluation":
        return Evaluation(self)


class WeightedBatch(NamedTuple):
    """A batch, and the weights of its micro-batches; None where all weigh the same."""

    tensors: Batch
    weights: Sequence[Tensor] | None


class PretrainingStep(MeteredStep):
    """The step of pre-training on batches of windows."""

    def __init__(self, method: Pretraining) -> None:
        super().__init__()
        self.method = method
        self._fetcher: BatchFetcher | None = None

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        """Prefetches batches on the device, if the recipe says so."""
        device, how = loop.device_type, loop.recipe.data.prefetch
        with super().running(loop), contextlib.closing(open_fetcher(self.method.batches, device, how)) as self._fetcher:
            yield

    def batch(self, loop: TrainingLoop, number: int) -> WeightedBatch:
        assert self._fetcher is not None
        loop.reading_batch = True
        with loop.guarded(self.method.train_tokens):
            batch = self._fetcher[number]
        loop.reading_batch = False
        weights = loop.train_state.micro_batch_weights(batch[1]) if loop.ranks.world_size > 1 else None
        return WeightedBatch(batch, weights)

    def train(self, loop: TrainingLoop, number: int, batch: WeightedBatch, watch: Watch, is_fit: IsFit) -> Tensor:
        loss, _ = loop.train_state.step(number, *batch.tensors, weights=batch.weights, watch=watch, is_fit=is_fit)
        return loss

    def micro_batches(self, loop: TrainingLoop, batch: WeightedBatch) -> int:
        return len(batch.tensors[0]) // loop.recipe.training.resolved_micro_batch_size

    def tensors(self, batch: WeightedBatch) -> dict[str, Tensor]:
        """Inputs, targets and, where they are kept apart, the numbers of documents."""
        return dict(zip(("inputs", "targets", "documents"), batch.tensors, strict=False))

    def tokens(self, loop: TrainingLoop) -> tuple[int, int, float | None]:
        """All steps have the same number of tokens."""
        each = loop.recipe.tokens_per_step
        return loop.step * each, each, self.method.train_tokens.epochs(loop.step * each)


class Evaluation(Callback):
    """Evaluates on a sample of the validation tokens when due, with averaged weights if there are any."""

    def __init__(self, method: Pretraining) -> None:
        self.method = method

    def after_step(self, loop: TrainingLoop, metrics: StepMetrics) -> StepMetrics:
        """Add the validation loss. Raises NapkinError where it is not finite."""
        if not loop.evaluation_is_due:
            return metrics
        tokens, training = self.method.validation_tokens, loop.recipe.training
        if tokens is None:
            return dataclasses.replace(metrics, validation_loss=None, seconds=loop.seconds)
        with loop.watch("evaluation"), loop.guarded(tokens), loop.train_state.averaged():
            loss = mean_loss(
                loop.train_state.model,
                tokens,
                loop.preparation.precision,
                max_tokens=training.evaluation_tokens,
                # At most a micro-batch at a time, so that an evaluation needs no more memory than a step.
                batch_size=min(training.resolved_micro_batch_size, EVALUATION_BATCH_SIZE),
                separate_documents=loop.recipe.data.separate_documents,
                progress=lambda done, total: (
                    loop.interruption.give_up() if done < total and loop.ranks.world_size == 1 else None
                ),
                parallel_model=loop.train_state.parallel_model,
            )
        if not math.isfinite(loss):
            raise NapkinError(f"step {loop.step}: the validation loss is {loss}: {lower_learning_rate(loop.run.path)}")
        loop.history.add_validation(loop.step, loss)
        return dataclasses.replace(metrics, validation_loss=loss, seconds=loop.seconds)


def _batches(recipe: Recipe, train_tokens: TokenMixture, rows: slice = slice(None)) -> Batches:
    return Batches(
        train_tokens,
        context_length=recipe.model.context_length,
        batch_size=recipe.training.batch_size,
        seed=recipe.training.data_seed,
        rows=rows,
        separate_documents=recipe.data.separate_documents,
        windows="fixed" if recipe.data.windows == "fixed" else "shifted",
    )
