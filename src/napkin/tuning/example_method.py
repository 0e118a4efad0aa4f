"""Methods that train on a fixed set of examples: supervised tuning, preferences, reward models."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from napkin.accounting.ledger import METERED_STEP
from napkin.accounting.pricing import Measurement
from napkin.chats.token_sequence import Example
from napkin.data.permutation import KeyedPermutation
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.transformer import TokenScores
from napkin.planning.step.run_plan import Plan
from napkin.planning.step.site import memory_of, step_memory
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import lower_learning_rate
from napkin.train_step.step import TrainState, Watch
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.metered_step import IsFit, MeteredStep
from napkin.training.method import Setting
from napkin.tuning.example_file import ExampleFile, ExampleKind, example_file_of
from napkin.tuning.example_plan import plan_examples
from napkin.tuning.longest_examples import LongestExamples
from napkin.tuning.method import TuningContext, TuningMethod
from napkin.tuning.packing import SequenceMicroBatch, chunks_of
from napkin.tuning.sequence_step import (
    BatchTotals,
    Metrics,
    Normalisation,
    Objective,
    SequenceScores,
    SequenceStep,
    evaluate_examples,
    normalised_sum,
    normalised_weights,
    score_examples,
    train_on_examples,
)


class ExampleMethod(TuningMethod):
    """Trains on a fixed set of examples by an objective; each epoch is a different permutation of all of them.

    `examples` are read when a batch needs them; `held_out` are evaluated on, and may be empty.
    """

    def __init__(
        self,
        context: TuningContext,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        checksum: str,
        objective: Objective,
    ) -> None:
        super().__init__(context)
        if not len(examples):
            raise NapkinError(f"'{context.recipe.data.train}' holds nothing to train on: name a file that does")
        self.examples, self.held_out, self.objective = examples, held_out, objective
        self._checksum = checksum

    @property
    def data_checksum(self) -> str:
        return self._checksum

    def batch(self, number: int) -> list[Example]:
        """The examples of a step: every example of an epoch comes once before any comes again."""
        size, n = self.recipe.training.batch_size, len(self.examples)
        places = np.arange(number * size, (number + 1) * size)
        examples: list[Example] = []
        for epoch in range(int(places[0]) // n, int(places[-1]) // n + 1):
            key = f"units seed {self.recipe.training.data_seed} epoch {epoch}"
            shuffle = KeyedPermutation(n, int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little"))
            examples += [self.examples[int(place)] for place in shuffle(places[places // n == epoch] % n)]
        return examples

    def prepared(self, train_state: TrainState, examples: Sequence[Example]) -> Sequence[Example]:
        """Add to a batch what the objective reads and the model must compute before the step; a collective."""
        return examples

    def scored(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The examples that `prepared` scores without gradients, for the plan."""
        return ()

    def planned(self, examples: Sequence[Example]) -> Sequence[Example]:
        """The batch with stand-ins for what a run computes first, as a plan counts it."""
        return examples

    @property
    def planned_objective(self) -> Objective:
        """The objective as a plan counts it, with stand-ins for what a run opens first."""
        return self.objective

    def scores(
        self, train_state: TrainState, examples: Sequence[Example]
    ) -> Iterator[tuple[Example, tuple[SequenceScores, ...]]]:
        """Score examples without gradients, a chunk of them at a time; a collective."""
        for chunk in chunks_of(examples):
            scores = score_examples(
                train_state.parallel_model,
                chunk,
                max_tokens=self.max_tokens,
                packing=self.packing,
                autocast=train_state.precision.autocast,
            )
            yield from zip(chunk, scores, strict=True)

    @property
    def reference_tokens(self) -> int:
        """Tokens whose reference log-probabilities are computed before the first step."""
        return 0

    @property
    def teacher_config(self) -> ModelConfig | None:
        """The model that computes a step's tokens too, as a teacher; None without one."""
        return None

    def metered(self, loop: TrainingLoop) -> dict[str, float]:
        """Measurements outside of steps, by the names of the plan's rows."""
        return {}

    def step(self) -> MeteredStep:
        return ExampleStep(self)

    def evaluation(self) -> Callback:
        return ExampleEvaluation(self)

    def make_plan(self, setting: Setting) -> Plan:
        number = min(METERED_STEP, self.recipe.training.steps - 1)
        batch = self.batch(number)
        plan = plan_examples(
            self.resolved,
            self.planned(batch),
            self.planned_objective,
            setting.machine(self.recipe),
            setting.progress,
            max_tokens=self.max_tokens,
            packing=self.packing,
            scored=self.scored(batch),
            reference_tokens=self.reference_tokens,
        )
        plan = dataclasses.replace(plan, teacher=self.teacher_config)
        setting.progress("looking for the longest step")
        known = {number: plan.ledger.peak_bytes}
        longest = self.longest_examples.find(step_memory(plan.site.memory_bytes), known)
        if longest is not None:
            # A model that does not fit at all is refused with other suggestions.
            if plan.fits and not longest.fits:
                raise NapkinError(f"{memory_of(plan.site.device_name, plan.site.memory_bytes)}: {longest.sentence()}")
            setting.on_message(longest.sentence())
        return dataclasses.replace(plan, longest=longest)

    @property
    def longest_examples(self) -> LongestExamples:
        """The search for the step that takes most memory."""
        return LongestExamples(
            self.resolved,
            self.planned_objective,
            self.batch,
            max_tokens=self.max_tokens,
            packing=self.packing,
            planned=self.planned,
            scored=self.scored,
        )


class ExampleStep(MeteredStep):
    """The step of an `ExampleMethod`."""

    def __init__(self, method: ExampleMethod) -> None:
        super().__init__()
        self.method = method
        self.last: SequenceStep | None = None

    def batch(self, loop: TrainingLoop, number: int) -> list[Example]:
        return self.method.batch(number)

    def train(self, loop: TrainingLoop, number: int, batch: list[Example], watch: Watch, is_fit: IsFit) -> Tensor:
        method = self.method
        self.last = train_on_examples(
            loop.train_state,
            number,
            method.prepared(loop.train_state, batch),
            method.objective,
            max_tokens=method.max_tokens,
            packing=method.packing,
            watch=watch,
            is_fit=is_fit,
        )
        return torch.tensor(self.last.loss)

    def micro_batches(self, loop: TrainingLoop, batch: list[Example]) -> int:
        tokens = sum(len(sequence.tokens) for example in batch for sequence in example)
        return math.ceil(tokens / self.method.max_tokens)

    def tensors(self, batch: list[Example]) -> dict[str, Tensor]:
        sequences = [sequence for example in batch for sequence in example]
        return {f"sequence {number}": torch.from_numpy(each.tokens) for number, each in enumerate(sequences)}

    def tokens(self, loop: TrainingLoop) -> tuple[int, int, float | None]:
        assert self.last is not None
        loop.history.tokens += self.last.totals.tokens
        epochs = loop.step * loop.recipe.training.batch_size / len(self.method.examples)
        return loop.history.tokens, self.last.totals.tokens, epochs

    def measurement(self, loop: TrainingLoop) -> Measurement | None:
        measurement = super().measurement(loop)
        return measurement and dataclasses.replace(measurement, further=self.method.metered(loop))

    def further_metrics(self) -> dict[str, float | None]:
        assert self.last is not None
        return dict(self.last.metrics)


class ExampleEvaluation(Callback):
    """Evaluates on held-out examples when due, with averaged weights if there are any."""

    def __init__(self, method: ExampleMethod) -> None:
        self.method = method

    def after_step(self, loop: TrainingLoop, metrics: StepMetrics) -> StepMetrics:
        """Add the held-out loss and metrics. Raises NapkinError where the loss is not finite."""
        method = self.method
        if not loop.evaluation_is_due or not len(method.held_out):
            return metrics
        with loop.watch("evaluation"), loop.train_state.averaged():
            loss, evaluated = evaluate_examples(
                loop.train_state,
                method.prepared(loop.train_state, method.held_out),
                method.objective,
                max_tokens=method.max_tokens,
                packing=method.packing,
            )
        if not math.isfinite(loss):
            raise NapkinError(f"step {loop.step}: the held-out loss is {loss}: {lower_learning_rate(loop.run.path)}")
        loop.history.add_validation(loop.step, loss)
        figures = {**(metrics.figures or {}), **{f"held-out {name}": value for name, value in evaluated.items()}}
        return dataclasses.replace(metrics, validation_loss=loss, figures=figures, seconds=loop.seconds)


def open_examples(
    context: TuningContext, kind: ExampleKind, *, max_length: int
) -> tuple[ExampleFile, ExampleFile | None]:
    """Open data.train, and data.validation if it names a file; sequences have at most `max_length` tokens.

    Raises NapkinError where one cannot be read or holds nothing to train on.
    """
    data = context.recipe.data
    if not isinstance(data.train, str):
        raise NapkinError("data.train names several files, and tuning reads one: join them")
    if not data.train:
        raise NapkinError(f"no {kind} to train on are named: use --data.train with a file of JSON lines")

    def opened(path: str) -> ExampleFile:
        examples = example_file_of(
            path,
            kind,
            context.encoder,
            max_length=max_length,
            progress=lambda n: None if n % 1000 else context.setting.progress(f"encoding {n:,} {kind}"),
        )
        left_out = examples.left_out
        if left_out.n and context.setting.ranks.is_rank_zero:
            n = left_out.n + len(examples)
            context.setting.on_message(f"'{path}': {left_out.n:,} of {n:,} {kind} are left out: {left_out.describe()}")
        return examples

    return opened(data.train), opened(data.validation) if data.validation else None


@dataclass(frozen=True)
class SupervisedObjective:
    """-log p(token), averaged by `normalisation`; `constant` is the divisor of "constant"."""

    normalisation: Normalisation = "token"
    constant: float | None = None

    def coefficients(self, part: SequenceMicroBatch, totals: BatchTotals) -> Float[Tensor, " token"]:
        return -normalised_weights(part, totals, self.normalisation, self.constant)

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        loss = scores.weighted_sum
        if loss is None:
            loss = normalised_sum(-scores.log_probabilities, part, totals, self.normalisation, self.constant)
        entropy = scores.entropies.detach().sum() / max(totals.tokens, 1)
        return loss, {"entropy": entropy}


def supervised_examples(
    context: TuningContext,
) -> tuple[Sequence[Example], Sequence[Example], str, int]:
    """The conversations to learn and those held out, the checksum of both, and the length of the longest."""
    tuning, limit = context.recipe.tuning, context.recipe.model.context_length
    if tuning.max_length > limit:
        raise NapkinError(
            f"tuning.max_length is {tuning.max_length:,}, the model's context length is {limit:,}: use at most that"
        )
    longest = tuning.max_length or limit
    if not context.encoder.end_ids:
        context.setting.on_message(
            "the chat template ends answers with text and not with a special token: the tuned model may not know where "
            "to end"
        )
    train, held_out = open_examples(context, "conversations", max_length=longest)
    checksum = train.checksum
    if held_out is not None:
        checksum = sha256(f"{train.checksum} {held_out.checksum}".encode()).hexdigest()
    return train, held_out or (), checksum, longest


class SupervisedMethod(ExampleMethod):
    """Trains on conversations: data.train and data.validation are JSON lines, or files of `napkin data chat`."""

    @classmethod
    def open(cls, context: TuningContext) -> "SupervisedMethod":
        train, held_out, checksum, longest = supervised_examples(context)
        objective = SupervisedObjective(context.recipe.tuning.normalisation, float(longest))
        return cls(context, train, held_out, checksum, objective)
