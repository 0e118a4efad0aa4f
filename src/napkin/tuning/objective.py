"""The protocol of an objective: the loss of a micro-batch as a part of the loss of the whole batch.

What a loss divides by is known before the first forward pass, of the whole batch over all ranks. Each micro-batch then
adds its part, and the gradient does not depend on how the batch was divided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.chats.token_sequence import Example
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.tuning.packing import SequenceMicroBatch

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
