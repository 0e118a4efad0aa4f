"""Supervised fine-tuning: the negative log-likelihood of the tokens that count."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from napkin.alignment.objective import BatchTotals, Figures, Normalisation, normalised_sum, normalised_weights
from napkin.alignment.sequence_packing import SequenceMicroBatch
from napkin.model.transformer import TokenScores


@dataclass(frozen=True)
class SupervisedObjective:
    """-log p(token), averaged by `normalisation`; `constant` is what "constant" divides a sequence's sum by."""

    normalisation: Normalisation = "token"
    constant: float | None = None

    def coefficients(self, part: SequenceMicroBatch, totals: BatchTotals) -> Float[Tensor, " token"]:
        """See `WeightedLogProbabilities`."""
        return -normalised_weights(part, totals, self.normalisation, self.constant)

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Figures]:
        """See `Objective`."""
        loss = scores.weighted_sum
        if loss is None:
            loss = normalised_sum(-scores.log_probabilities, part, totals, self.normalisation, self.constant)
        entropy = scores.entropies.detach().sum() / max(totals.tokens, 1)
        return loss, {"entropy": entropy}
