"""A reward model: one number for an answer, learned from which of two answers is better.

A head reads the state after the whole answer. `rewarded` closes a sequence with one token that counts, and that nothing
sees: the head's number is the one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from napkin.chats.token_sequence import TokenSequence
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.tuning.objective import BatchTotals, Figures
from napkin.tuning.packing import PADDING, SequenceMicroBatch
from napkin.tuning.preferences.pair_objectives import last_of_answers, pair_figures, pairs_of


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


# FOLD tuning/preferences/reward_model.py
# How far the probabilities of a reward model can be taken at their word.
#
# A pair's winner is known, and which of its answers is named first is arbitrary. So a pair counts by the answer that
# the
# model prefers: its probability is at least a half, and it is right or wrong.


@dataclass(frozen=True)
class ReliabilityBin:
    """Pairs whose preferred answer has a probability in one interval."""

    low: float
    high: float
    pairs: int
    probability: float
    """The mean of what the model says."""
    right: float
    """The share of pairs whose chosen answer is the preferred one; an even pair is half right."""


@dataclass(frozen=True)
class Calibration:
    """Reliability of P(chosen wins) on some pairs."""

    bins: tuple[ReliabilityBin, ...]
    """Those that hold pairs, by their probability."""
    pairs: int
    accuracy: float
    loss: float
    """The mean of -log P(chosen wins), in nats; log 2 is that of no opinion."""
    expected_error: float
    """Mean over pairs of |probability - share right| of their bin: the expected calibration error (Naeini et al.
    2015)."""

    def lines(self) -> list[str]:
        """What it says in words, and the reliability by bins."""
        summary = (
            f"{self.pairs:,} held-out pairs: accuracy {self.accuracy:.3f}, loss {self.loss:.3f} nats, expected "
            f"calibration error {self.expected_error:.3f}"
        )
        return [
            summary,
            *(
                f"  says {each.low:.2f} to {each.high:.2f}: {each.probability:.3f} on average, right {each.right:.3f} "
                f"of {each.pairs:,} pairs"
                for each in self.bins
            ),
        ]


def calibration_of(margins: Float[np.ndarray, " pair"] | Sequence[float], *, bins: int = 10) -> Calibration:
    """Calibration on pairs, of r(chosen) - r(rejected), in `bins` intervals of equal width from 0.5 to 1.

    Raises NapkinError for no pairs, or a margin that is not finite.
    """
    differences = np.asarray(margins, dtype=np.float64)
    if not len(differences) or not np.isfinite(differences).all() or bins < 1:
        raise NapkinError(
            f"{len(differences)} margins of rewards, {int((~np.isfinite(differences)).sum())} of them not finite, in "
            f"{bins} bins, have no calibration: give one finite margin or more"
        )
    confidence = 1 / (1 + np.exp(-np.abs(differences)))
    right = np.where(differences == 0, 0.5, differences > 0)
    numbers = np.minimum((2 * bins * (confidence - 0.5)).astype(int), bins - 1)
    found = tuple(
        _bin(number, bins, confidence[numbers == number], right[numbers == number])
        for number in np.unique(numbers).tolist()
    )
    error = sum(each.pairs * abs(each.probability - each.right) for each in found) / len(differences)
    loss = float(np.logaddexp(0, -differences).mean())
    return Calibration(found, len(differences), float(right.mean()), loss, float(error))


def _bin(number: int, bins: int, confidence: NDArray[np.float64], right: NDArray[np.float64]) -> ReliabilityBin:
    low, high = (0.5 + 0.5 * edge / bins for edge in (number, number + 1))
    return ReliabilityBin(float(low), float(high), len(right), float(confidence.mean()), float(right.mean()))
