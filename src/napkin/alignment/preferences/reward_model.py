"""A reward model: one number for an answer, learned from which of two answers is better.

A head reads the state after the whole answer. `rewarded` closes a sequence with one token that counts, and that nothing
sees: the head's number is the one before it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from napkin.alignment.objective import BatchTotals, Figures
from napkin.alignment.preferences.answer_scores import last_of_answers, pairs_of
from napkin.alignment.preferences.pair_objective import pair_figures
from napkin.alignment.sequence_packing import PADDING, SequenceMicroBatch
from napkin.alignment.token_sequence import TokenSequence
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores


def bradley_terry_losses(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
    """-log P(chosen wins), P = σ(r(chosen) - r(rejected)) (Bradley and Terry 1952; Ouyang et al. 2022, equation 1)."""
    return -logsigmoid(chosen - rejected)


def rewarded(sequence: TokenSequence) -> TokenSequence:
    """A sequence of which only a token after its end counts: there the reward is read."""
    tokens = np.append(sequence.tokens, PADDING)
    return TokenSequence(tokens, np.arange(len(tokens)) == len(tokens) - 1)


@dataclass(frozen=True)
class RewardObjective:
    """`bradley_terry_losses` of pairs whose sequences `rewarded` has made, by a model with a scalar head."""

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Figures]:
        """See `Objective`."""
        if scores.scalars is None:
            raise NapkinError("the model has no scalar head, which rewards are read from: add one with add_scalar_head")
        chosen, rejected = pairs_of(last_of_answers(scores.scalars, part), part)
        loss = bradley_terry_losses(chosen, rejected).sum() / max(totals.units, 1)
        return loss, pair_figures(chosen, rejected, totals)
