"""What the objectives of pairs share: the mean over the pairs of a batch, the supervised term, and the figures."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.tuning.objective import REFERENCE, BatchTotals, Figures, counts_of_sequences, sums_of_sequences, values_of
from napkin.tuning.packing import SequenceMicroBatch

# FOLD tuning/preferences/pair_objectives.py
# One number for each answer of a micro-batch: its log-probability, alone or beside that of a reference model.


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


@dataclass(frozen=True)
class PairObjective:
    """The mean loss of pairs (chosen, rejected). Each objective says what a pair's loss is.

    An answer's implicit reward is beta times the log-probability that the objective compares.
    """

    beta: float
    per_token: bool = False
    """Whether an answer's log-probability is the mean over its tokens instead of the sum."""
    has_reference = True
    """Whether log-probabilities are taken beside those of a reference model."""

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Figures]:
        """See `Objective`."""
        score = log_ratios_of_answers if self.has_reference else log_probabilities_of_answers
        chosen, rejected = pairs_of(score(part, scores, per_token=self.per_token), part)
        likelihoods, _ = pairs_of(log_probabilities_of_answers(part, scores, per_token=True), part)
        losses = self.pair_losses(chosen, rejected) + self.supervised_share * -likelihoods
        sums, rejected_sums = pairs_of(log_probabilities_of_answers(part, scores), part)
        figures = pair_figures(self.beta * chosen, self.beta * rejected, totals)
        figures["chosen_log_probability"] = sums.detach().sum() / max(totals.units, 1)
        figures["rejected_log_probability"] = rejected_sums.detach().sum() / max(totals.units, 1)
        return losses.sum() / max(totals.units, 1), figures

    @property
    def supervised_share(self) -> float:
        """Weight of the negative log-likelihood of the chosen answer, per token."""
        return 0.0

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """The loss of each pair, of its answers' log-probabilities or log-ratios."""
        raise NotImplementedError


def pair_figures(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], totals: BatchTotals) -> Figures:
    """Of rewards: how often the chosen answer's is higher (equal ones count half), by how much, and both means."""
    chosen, rejected = chosen.detach(), rejected.detach()
    wins = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    means = {"accuracy": wins, "margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected}
    return {name: value.sum() / max(totals.units, 1) for name, value in means.items()}


# FOLD tuning/preferences/pair_objectives.py
# Direct preference optimisation: the policy is its own reward model.


def dpo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Tensor, " pair"]:
    """-(1 - ε) log σ(h) - ε log σ(-h), h = β (chosen - rejected), of log-ratios log π(y | x) - log π_ref(y | x).

    Rafailov et al. 2023, equation 7; ε, the probability that a label is wrong: Mitchell 2023, "A note on DPO with noisy
    preferences".
    """
    difference = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)


@dataclass(frozen=True)
class DPOObjective(PairObjective):
    """`dpo_losses`, and the chosen answer's negative log-likelihood per token (Pang et al. 2024, equation 1) times
    `supervised_weight`."""

    label_smoothing: float = 0.0
    supervised_weight: float = 0.0

    @property
    def supervised_share(self) -> float:
        """See `PairObjective`."""
        return self.supervised_weight

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """See `PairObjective`."""
        return dpo_losses(chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing)


# FOLD tuning/preferences/pair_objectives.py
# Identity preference optimisation: a difference is regressed, so that it stays bounded where every pair agrees.


def ipo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float
) -> Float[Tensor, " pair"]:
    """(chosen - rejected - 1 / (2 β))², of log-ratios log π(y | x) - log π_ref(y | x).

    Azar et al. 2023, equation 17, whose τ is β here. The recipe's objective takes the means of log-ratios per token:
    with sums, one target for answers of all lengths would be a different one per token for each.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


@dataclass(frozen=True)
class IPOObjective(PairObjective):
    """`ipo_losses`."""

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """See `PairObjective`."""
        return ipo_losses(chosen, rejected, beta=self.beta)


# FOLD tuning/preferences/pair_objectives.py
# Simple preference optimisation: mean log-probabilities with a target margin, and no reference.


def simpo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float, margin: float = 0.0
) -> Float[Tensor, " pair"]:
    """-log σ(β (chosen - rejected) - γ), of mean log-probabilities per token; γ is `margin`.

    Meng et al. 2024, equation 6.
    """
    return -logsigmoid(beta * (chosen - rejected) - margin)


@dataclass(frozen=True)
class SimPOObjective(PairObjective):
    """`simpo_losses`."""

    per_token: bool = True
    margin: float = 0.0
    has_reference = False

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """See `PairObjective`."""
        return simpo_losses(chosen, rejected, beta=self.beta, margin=self.margin)


# FOLD tuning/preferences/pair_objectives.py
# Odds ratio preference optimisation: supervised tuning that also moves the odds from one answer to the other.

_HIGHEST = -1e-6
"""Log-probability per token above which the odds are taken as those of this: they are infinite at 0."""


def orpo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float
) -> Float[Tensor, " pair"]:
    """-chosen - β log σ(log odds(chosen) - log odds(rejected)), of mean log-probabilities per token; odds(p) = p / (1 -
    p).

    Hong et al. 2024, equations 4 to 7, whose λ is β here.
    """
    return -chosen - beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(log_probabilities: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """log(p / (1 - p)), of log p."""
    bounded = log_probabilities.clamp(max=_HIGHEST)
    # log(1 - p): each form where it is exact. The other's argument is kept from where its gradient is not finite.
    near_one = bounded > -math.log(2)
    of_large = torch.log(-torch.expm1(torch.where(near_one, bounded, -1.0)))
    of_small = torch.log1p(-torch.exp(torch.where(near_one, -1.0, bounded)))
    return bounded - torch.where(near_one, of_large, of_small)


@dataclass(frozen=True)
class ORPOObjective(PairObjective):
    """`orpo_losses`."""

    per_token: bool = True
    has_reference = False

    def pair_losses(self, chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
        """See `PairObjective`."""
        return orpo_losses(chosen, rejected, beta=self.beta)
