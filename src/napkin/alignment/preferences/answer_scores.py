"""One number for each answer of a micro-batch: its log-probability, alone or beside that of a reference model."""

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.alignment.objective import REFERENCE, counts_of_sequences, sums_of_sequences, values_of
from napkin.alignment.sequence_packing import SequenceMicroBatch
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores


def log_probabilities_of_answers(
    part: SequenceMicroBatch, scores: TokenScores, *, per_token: bool = False
) -> Float[Tensor, " sequence"]:
    """log π(answer | prompt): the sum over the answer's tokens, or with `per_token` their mean."""
    return _of_answers(scores.log_probabilities, part, per_token)


def log_ratios_of_answers(
    part: SequenceMicroBatch, scores: TokenScores, *, per_token: bool = False
) -> Float[Tensor, " sequence"]:
    """log π(answer | prompt) - log π_ref(answer | prompt), summed over the answer's tokens, or their mean.

    Raises NapkinError where the sequences have no reference's log-probabilities.
    """
    # Token by token: two large sums that are nearly equal would lose digits.
    return _of_answers(scores.log_probabilities - values_of(part, REFERENCE), part, per_token)


def last_of_answers(values: Float[Tensor, " token"], part: SequenceMicroBatch) -> Float[Tensor, " sequence"]:
    """The value at each sequence's last token that counts."""
    numbers = torch.arange(part.n_sequences, device=part.sequence.device)
    return values[torch.searchsorted(part.sequence, numbers, right=True) - 1]


def pairs_of(
    values: Float[Tensor, " sequence"], part: SequenceMicroBatch
) -> tuple[Float[Tensor, " pair"], Float[Tensor, " pair"]]:
    """The values of chosen and of rejected answers. Raises NapkinError for units that are not pairs."""
    for number, unit in zip(part.unit_numbers, part.units, strict=True):
        if len(unit) != 2 or not all(sequence.n_counted for sequence in unit):
            raise NapkinError(
                f"unit {number} has {len(unit)} sequences, of which "
                f"{sum(not sequence.n_counted for sequence in unit)} count no token: give pairs of a chosen and a "
                "rejected answer"
            )
    pairs = values.view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _of_answers(terms: Tensor, part: SequenceMicroBatch, per_token: bool) -> Tensor:
    sums = sums_of_sequences(terms, part)
    return sums / counts_of_sequences(part).clamp(min=1) if per_token else sums
