"""Objectives, which are losses over micro-batches; a step on a batch of examples, their evaluation and their scores: on
any number of ranks, in micro-batches of any size.

What a loss divides by is counted over the whole batch first. Ranks and micro-batches then add parts of one sum, so the
gradient is the same however a batch is divided.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from napkin.chats.token_sequence import Example
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.pipeline_stages import PackedRows
from napkin.errors import NapkinError
from napkin.kernels.loss.distillation import Distillation
from napkin.model.transformer import TokenScores, evaluation_mode
from napkin.recipe.layout import Layout
from napkin.tensors import together
from napkin.train_step.step import TrainState, Watch
from napkin.tuning.packing import Packing, SequenceMicroBatch, chunks_of, micro_batches_of

Normalisation = Literal["token", "sequence", "constant"]
"""The divisor of a token's term: the trained tokens of the batch; the trained tokens of its sequence times the number
of sequences, so that every sequence weighs the same; or a constant times the number of sequences, as in Dr. GRPO (Liu
et al. 2025)."""

Metrics = dict[str, Tensor]
"""A micro-batch's part of each metric, by name. Parts add up to the batch's value; of a name that ends in _max the
largest part is the batch's."""

Number = TypeVar("Number", float, Tensor)

REFERENCE = "reference_log_probabilities"
"""The name in `TokenSequence.values` of a reference model's log-probabilities."""


@dataclass(frozen=True)
class BatchTotals:
    """Counts of the whole batch, over all ranks: the divisors of losses."""

    tokens: int
    """Tokens that are trained on."""
    sequences: int
    examples: int

    @staticmethod
    def of_examples(examples: Sequence[Example]) -> "BatchTotals":
        tokens = sequences = 0
        for example in examples:
            tokens += sum(each.n_trained for each in example)
            sequences += len(example)
        return BatchTotals(tokens, sequences, len(examples))


@runtime_checkable
class Objective(Protocol):
    """The protocol of a loss over micro-batches."""

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        """Return a micro-batch's part of the batch's loss, and of its metrics.

        `scores` are of the tokens of `part` that are trained on, sequence by sequence.
        """
        ...


@runtime_checkable
class WeightedLogProbabilities(Protocol):
    """An objective whose loss is a weighted sum of log-probabilities, by weights that are known before the model runs:
    it may take `scores.weighted_sum`, which saves products."""

    def coefficients(self, part: SequenceMicroBatch, totals: BatchTotals) -> Float[Tensor, " token"] | None:
        """Return the weights of a micro-batch's trained tokens; None where they depend on the model's output."""
        ...


@runtime_checkable
class TaughtObjective(Protocol):
    """An objective that compares with a teacher's distributions."""

    def attach(self, train_state: TrainState) -> None:
        """Keep the teacher in memory beside the model in training, real or fake."""
        ...

    def teaching(self, part: SequenceMicroBatch) -> Callable[[PackedRows], Distillation]:
        """Return the function that computes what the teacher says of a micro-batch's trained tokens."""
        ...


def normalised_sum(
    terms: Float[Tensor, " token"],
    part: SequenceMicroBatch,
    totals: BatchTotals,
    normalisation: Normalisation,
    constant: float | None = None,
) -> Float[Tensor, ""]:
    """Sum a micro-batch's part of the mean of all tokens' terms, see `Normalisation`; `constant` is that of "constant".

    Sequences without a trained token add nothing.
    """
    return (terms * normalised_weights(part, totals, normalisation, constant, dtype=terms.dtype)).sum()


def normalised_weights(
    part: SequenceMicroBatch,
    totals: BatchTotals,
    normalisation: Normalisation,
    constant: float | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " token"]:
    """The factors by which `normalised_sum` multiplies each token's term."""
    ones = torch.ones_like(part.sequence, dtype=dtype)
    if normalisation == "token":
        return ones / max(totals.tokens, 1)
    if normalisation == "sequence":
        return ones / (trained_tokens_of_sequences(part)[part.sequence] * max(totals.sequences, 1))
    if constant is None or not constant > 0:
        raise NapkinError(f"the constant that sums are divided by is {constant}: use a number above 0")
    return ones / (constant * max(totals.sequences, 1))


def values_of(part: SequenceMicroBatch, name: str) -> Float[Tensor, " token"]:
    """Return the values that the sequences carry under `name`. Raises NapkinError where they have none."""
    if name not in part.values:
        raise NapkinError(f"the sequences have no '{name}', which the objective reads: add them with with_values")
    return part.values[name]


def sums_of_sequences(terms: Float[Tensor, " token"], part: SequenceMicroBatch) -> Float[Tensor, " sequence"]:
    return torch.zeros(part.n_sequences, dtype=terms.dtype, device=terms.device).index_add(0, part.sequence, terms)


def trained_tokens_of_sequences(part: SequenceMicroBatch) -> Float[Tensor, " sequence"]:
    return sums_of_sequences(torch.ones_like(part.sequence, dtype=torch.float32), part)


def totals_of(parts: Sequence[SequenceMicroBatch]) -> BatchTotals:
    return BatchTotals(
        tokens=sum(len(part.rows.targets) for part in parts),
        sequences=sum(part.n_sequences for part in parts),
        examples=sum(len(part.examples) for part in parts),
    )


def add_metrics(total: dict[str, Number], part: Mapping[str, Number]) -> None:
    """Add metrics of a part of the batch to those of earlier parts, see `Metrics`."""
    for name, value in part.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = _largest(total[name], value) if name.endswith("_max") else total[name] + value


def _largest(one: Number, other: Number) -> Number:
    # Python's own max would wait for a GPU, and has no answer while a step is traced.
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.maximum(one, other)
    return max(one, other)


@dataclass(frozen=True)
class SequenceStep:
    """The outcome of a step on a batch, over all ranks unless said otherwise."""

    loss: float
    gradient_norm: float
    """The norm before clipping; 0 where fp16 overflowed and the update was skipped."""
    metrics: dict[str, float]
    totals: BatchTotals
    tokens_computed: int
    """Tokens that went through the model on this rank, padding included."""


class SequenceScores(NamedTuple):
    """The model's outputs at the trained tokens of a sequence."""

    log_probabilities: Float32[np.ndarray, " counted"]
    entropies: Float32[np.ndarray, " counted"]
    scalars: Float32[np.ndarray, " counted"] | None = None
    """Outputs of the scalar head; None without one."""


def train_on_examples(
    train_state: TrainState,
    number: int,
    examples: Sequence[Example],
    objective: Objective,
    *,
    max_tokens: int,
    packing: Packing = "packed",
    temperature: float = 1.0,
    divided: bool = False,
    watch: Watch = lambda part: nullcontext(),
    is_fit: Callable[[Tensor, Tensor], bool] = lambda loss, norm: True,
) -> SequenceStep:
    """Train on one batch, as step `number`; a collective.

    All ranks give the whole batch, or with `divided` each its own examples, which no other rank has. `max_tokens` is
    the size of a micro-batch, padding included. `watch` and `is_fit` are as in `TrainState.step`.

    Raises NapkinError for a layout that divides more than batches, for a batch without a trained token, and for a
    sequence longer than the model's context.
    """
    model = train_state.parallel_model
    own = examples if divided else examples_of_rank(examples, model.layout, model.ranks.info.rank)
    refuse_divided_models(model.layout)
    totals = BatchTotals.of_examples(examples)
    if divided:
        own_totals = torch.tensor([totals.tokens, totals.sequences, totals.examples])
        totals = BatchTotals(*model.ranks.all_reduce_sum(own_totals).tolist())
    if not totals.tokens:
        raise NapkinError(
            f"none of the {sum(len(each.tokens) for example in examples for each in example):,} tokens of a batch of "
            f"{totals.examples} examples is trained on: change which tokens are trained on so that some are"
        )
    parts = _micro_batches(model, own, max_tokens, packing, temperature)
    parts = with_known_coefficients(parts, objective, totals)
    metrics: Metrics = {}
    loss_of = loss_of_parts(parts, objective, totals, metrics)
    numbers: list[float] = []

    def judge(loss: Tensor, norm: Tensor) -> bool:
        # All at once: a GPU is waited for once, before the update.
        loss, norm, *others = together(loss, norm, *metrics.values())
        numbers[:] = [float(each) for each in (loss, norm, *others)]
        return is_fit(loss, norm)

    train_state.step_on_sequences(number, [part.rows for part in parts], loss_of, watch=watch, is_fit=judge)
    tokens_computed = sum(part.rows.inputs.numel() for part in parts)
    loss, norm, *values = numbers
    summed = _summed(model, dict(zip(metrics, values, strict=True)))
    return SequenceStep(loss, norm, summed, totals, tokens_computed)


def with_known_coefficients(
    parts: Sequence[SequenceMicroBatch], objective: Objective, totals: BatchTotals
) -> list[SequenceMicroBatch]:
    """Give micro-batches the weights of their log-probabilities, where the objective knows them, and their teacher."""
    parts = with_teacher(parts, objective)
    if not isinstance(objective, WeightedLogProbabilities):
        return [*parts]
    known = [objective.coefficients(part, totals) for part in parts]
    return [part if each is None else part.with_coefficients(each) for part, each in zip(parts, known, strict=True)]


def with_teacher(parts: Sequence[SequenceMicroBatch], objective: Objective) -> list[SequenceMicroBatch]:
    """Give micro-batches their teacher, if the objective has one."""
    if not isinstance(objective, TaughtObjective):
        return [*parts]
    return [replace(part, rows=replace(part.rows, teacher=objective.teaching(part))) for part in parts]


def loss_of_parts(
    parts: Sequence[SequenceMicroBatch], objective: Objective, totals: BatchTotals, metrics: Metrics
) -> Callable[[int, TokenScores], Float[Tensor, ""]]:
    """Return the function that `TrainState.step_on_sequences` calls for each micro-batch's loss; it adds metrics to
    `metrics`."""

    def loss_of(number: int, scores: TokenScores) -> Float[Tensor, ""]:
        part = parts[number]
        if not part.examples:
            # Other ranks have one more: the gradient of this one is 0, and takes part in what they exchange.
            return scores.log_probabilities.sum() if scores.weighted_sum is None else scores.weighted_sum
        loss, sums = objective.loss(part, scores, totals)
        add_metrics(metrics, {name: value.detach() for name, value in sums.items()})
        return loss

    return loss_of


def score_examples(
    model: ParallelModel,
    examples: Sequence[Example],
    *,
    max_tokens: int,
    packing: Packing = "packed",
    temperature: float = 1.0,
    divided: bool = False,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> list[tuple[SequenceScores, ...]]:
    """Score each sequence of each example, without gradients and dropout; a collective.

    All ranks give the same examples and have all scores, or with `divided` each its own. `autocast` is that of the
    precision that the model computes in, as `TrainState.precision.autocast`. Raises NapkinError as `train_on_examples`.
    """
    refuse_divided_models(model.layout)
    shared = not divided and model.layout.batch_parts > 1
    numbers = numbers_of_rank(examples, model.layout, model.ranks.info.rank) if shared else range(len(examples))
    parts = _micro_batches(model, [examples[number] for number in numbers], max_tokens, packing, temperature)
    ends = np.cumsum([0, *(each.n_trained for example in examples for each in example)])
    first_sequences = np.cumsum([0, *(len(example) for example in examples)])
    columns = 2 if model.model.scalar_head is None else 3
    table = torch.zeros(columns, int(ends[-1]))

    def keep(part: SequenceMicroBatch, scores: TokenScores) -> None:
        kept = torch.stack([each.float() for each in scores if each is not None]).cpu()
        begin = 0
        for number in part.example_numbers:
            start = int(ends[first_sequences[numbers[number]]])
            n = int(ends[first_sequences[numbers[number] + 1]]) - start
            table[:, start : start + n] = kept[:, begin : begin + n]
            begin += n

    try:
        score_parts(model, parts, autocast=autocast, keep=keep)
    finally:
        model.reshard()
    if shared:
        table = model.ranks.all_reduce_sum(table)
    scores = table.numpy()
    sequences = [SequenceScores(*scores[:, start:end]) for start, end in pairwise(ends)]
    return [tuple(sequences[a:b]) for a, b in pairwise(first_sequences)]


def evaluate_examples(
    train_state: TrainState,
    examples: Sequence[Example],
    objective: Objective,
    *,
    max_tokens: int,
    packing: Packing = "packed",
) -> tuple[float, dict[str, float]]:
    """The loss and metrics of an objective on all examples, a chunk at a time, divided among ranks; a collective."""
    model, totals = train_state.parallel_model, BatchTotals.of_examples(examples)
    sums: dict[str, float] = {}

    def keep(part: SequenceMicroBatch, scores: TokenScores) -> None:
        if part.examples:
            loss, metrics = objective.loss(part, scores, totals)
            add_metrics(sums, {name: float(value) for name, value in {"loss": loss, **metrics}.items()})

    for chunk in chunks_of(examples):
        own = examples_of_rank(chunk, model.layout, model.ranks.info.rank)
        parts = with_teacher(_micro_batches(model, own, max_tokens, packing, temperature=1.0), objective)
        score_parts(model, parts, autocast=train_state.precision.autocast, keep=keep)
    model.reshard()
    metrics = _summed(model, sums)
    return metrics.pop("loss"), metrics


def score_parts(
    model: ParallelModel,
    parts: Sequence[SequenceMicroBatch],
    *,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    keep: Callable[[SequenceMicroBatch, TokenScores], None] = lambda part, scores: None,
) -> None:
    """Score micro-batches without gradients and dropout, and pass each result to `keep`."""
    with torch.no_grad(), evaluation_mode(model.model):
        for part in parts:
            with autocast():
                scores = model.token_scores(part.rows)
            keep(part, scores)


def refuse_divided_models(layout: Layout) -> None:
    """Raise NapkinError for ranks that divide more than the batch: tensors, layers, positions or experts."""
    for dimension in ("pipeline", "context", "tensor", "expert"):
        if getattr(layout, dimension) > 1:
            raise NapkinError(
                f"tuning divides batches among ranks, and parallelism.{dimension} is {getattr(layout, dimension)}: "
                f"leave it at 1, and use training.parallelism ddp or fsdp"
            )


def examples_of_rank(examples: Sequence[Example], layout: Layout, rank: int) -> list[Example]:
    return [examples[number] for number in numbers_of_rank(examples, layout, rank)]


def numbers_of_rank(examples: Sequence[Example], layout: Layout, rank: int) -> list[int]:
    """The numbers of a batch's examples that a rank computes, by the examples alone: the longest come first, and each
    goes to the rank with the fewest tokens so far."""
    tokens = [sum(len(each.tokens) for each in example) for example in examples]
    loads = [0] * layout.batch_parts
    own: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(examples)), key=lambda number: -tokens[number]):
        part = loads.index(min(loads))
        loads[part] += tokens[number]
        own[part].append(number)
    return sorted(own[layout.batch_part(rank)])


def _micro_batches(
    model: ParallelModel, examples: Sequence[Example], max_tokens: int, packing: Packing, temperature: float
) -> list[SequenceMicroBatch]:
    """Pack this rank's micro-batches, on its device; with fsdp as many as any rank has."""
    settings = {"max_tokens": max_tokens, "row_length": model.model.config.context_length}
    parts = micro_batches_of(examples, **settings, packing=packing, temperature=temperature)
    wanted = max(len(parts), 1)
    if model.layout.strategy == "fsdp":
        wanted = model.ranks.all_reduce_max(wanted)
    parts += micro_batches_of([], **settings, packing=packing, temperature=temperature, at_least=wanted - len(parts))
    return [part.to(model.model.device) for part in parts]


def _summed(model: ParallelModel, metrics: dict[str, float]) -> dict[str, float]:
    """Add up metrics over ranks; a rank without examples has none."""
    total: dict[str, float] = {}
    for part in model.ranks.all_gather(metrics):
        add_metrics(total, part)
    return total
