"""Preferences: training on which of two completions is better, or on whether one is good.

First the losses, each a function on tensors with its equation; then the objectives around them, which take a
completion's log-probability from a batch; last a reward model's calibration. DPO makes the policy its own reward model.
IPO regresses a difference, which stays bounded even where every pair agrees. SimPO has a target margin and no
reference. ORPO is supervised tuning that also moves the odds. KTO is trained on single completions. A reward model
gives each completion a number.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.recipe.tuning_recipe import PreferenceConfig
from napkin.tuning.packing import PADDING, MappedExamples, SequenceMicroBatch
from napkin.tuning.sequence_step import (
    REFERENCE,
    BatchTotals,
    Metrics,
    sums_of_sequences,
    trained_tokens_of_sequences,
    values_of,
)


def dpo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Tensor, " pair"]:
    """-(1 - ε) log σ(h) - ε log σ(-h), h = β (chosen - rejected), of log-ratios log π(y | x) - log π_ref(y | x).

    Rafailov et al. 2023, equation 7; ε, the probability that a label is wrong: Mitchell 2023, "A note on DPO with noisy
    preferences".
    """
    difference = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)


def ipo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float
) -> Float[Tensor, " pair"]:
    """(chosen - rejected - 1 / (2 β))², of log-ratios log π(y | x) - log π_ref(y | x).

    Azar et al. 2023, equation 17, whose τ is β here. The recipe's objective takes the means of log-ratios per token:
    with sums, one target for completions of all lengths would be a different one per token for each.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def simpo_losses(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], *, beta: float, margin: float = 0.0
) -> Float[Tensor, " pair"]:
    """-log σ(β (chosen - rejected) - γ), of mean log-probabilities per token; γ is `margin`.

    Meng et al. 2024, equation 6.
    """
    return -logsigmoid(beta * (chosen - rejected) - margin)


_HIGHEST = -1e-6
"""The largest log-probability per token for which odds are computed: they are infinite at 0."""


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


def kto_losses(
    ratios: Float[Tensor, " completion"],
    desirable: Float[Tensor, " completion"],
    kl: Float[Tensor, " completion"],
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, " completion"]:
    """λ (1 - σ(±β (ratio - z))): + and λ_D for desirable completions (1), - and λ_U for undesirable ones (0).

    `ratios` are log π(y | x) - log π_ref(y | x), z is `kl`, at least 0 and without gradient. Ethayarajh et al. 2024,
    equations 7 and 8.
    """
    sign = 2 * desirable - 1
    weight = desirable * desirable_weight + (1 - desirable) * undesirable_weight
    return weight * (-sign * beta * (ratios - kl)).sigmoid()


def bradley_terry_losses(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
    """-log P(chosen wins), P = σ(r(chosen) - r(rejected)) (Bradley and Terry 1952; Ouyang et al. 2022, equation 1)."""
    return -logsigmoid(chosen - rejected)


@dataclass(frozen=True)
class PairObjective:
    """The mean loss of pairs (chosen, rejected).

    A completion's implicit reward is beta times the log-probability that the objective compares.
    """

    pair_losses: Callable[[Float[Tensor, " pair"], Float[Tensor, " pair"]], Float[Tensor, " pair"]]
    """The loss of each pair, from its completions' log-probabilities or log-ratios."""
    beta: float
    per_token: bool
    """True for the mean over a completion's tokens instead of the sum."""
    has_reference: bool
    """True for log-ratios to a reference model instead of log-probabilities."""
    supervised_weight: float = 0.0
    """Weight of the chosen completion's negative log-likelihood per token (Pang et al. 2024, equation 1)."""

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        score = completion_log_ratios if self.has_reference else completion_log_probabilities
        chosen, rejected = pairs_of(score(part, scores, per_token=self.per_token), part)
        likelihoods, _ = pairs_of(completion_log_probabilities(part, scores, per_token=True), part)
        losses = self.pair_losses(chosen, rejected) + self.supervised_weight * -likelihoods
        sums, rejected_sums = pairs_of(completion_log_probabilities(part, scores), part)
        metrics = pair_metrics(self.beta * chosen, self.beta * rejected, totals)
        metrics["chosen_log_probability"] = sums.detach().sum() / max(totals.examples, 1)
        metrics["rejected_log_probability"] = rejected_sums.detach().sum() / max(totals.examples, 1)
        return losses.sum() / max(totals.examples, 1), metrics


def preference_objective(config: PreferenceConfig) -> "PairObjective | KTOObjective":
    beta, per_token = config.beta, config.takes_means
    if config.objective == "kto":
        return KTOObjective(beta, per_token, config.desirable_weight, config.undesirable_weight)
    losses = {
        "dpo": partial(dpo_losses, beta=beta, label_smoothing=config.label_smoothing),
        "ipo": partial(ipo_losses, beta=beta),
        "orpo": partial(orpo_losses, beta=beta),
        "simpo": partial(simpo_losses, beta=beta, margin=config.margin),
    }
    return PairObjective(losses[config.objective], beta, per_token, config.has_reference, config.supervised_weight)


def pair_metrics(chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"], totals: BatchTotals) -> Metrics:
    """Accuracy (an even pair counts half), margin, and both means of rewards."""
    chosen, rejected = chosen.detach(), rejected.detach()
    wins = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    means = {"accuracy": wins, "margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected}
    return {name: value.sum() / max(totals.examples, 1) for name, value in means.items()}


def completion_log_probabilities(
    part: SequenceMicroBatch, scores: TokenScores, *, per_token: bool = False
) -> Float[Tensor, " sequence"]:
    """log π(completion | prompt): the sum over the completion's tokens, or with `per_token` their mean."""
    return _of_completions(scores.log_probabilities, part, per_token)


def completion_log_ratios(
    part: SequenceMicroBatch, scores: TokenScores, *, per_token: bool = False
) -> Float[Tensor, " sequence"]:
    """log π(completion | prompt) - log π_ref(completion | prompt), summed over the completion's tokens, or their mean.

    Raises NapkinError where the sequences have no reference's log-probabilities.
    """
    # Token by token: two large sums that are nearly equal would lose digits.
    return _of_completions(scores.log_probabilities - values_of(part, REFERENCE), part, per_token)


def last_of_completions(values: Float[Tensor, " token"], part: SequenceMicroBatch) -> Float[Tensor, " sequence"]:
    """The value at each sequence's last trained token."""
    numbers = torch.arange(part.n_sequences, device=part.sequence.device)
    return values[torch.searchsorted(part.sequence, numbers, right=True) - 1]


def pairs_of(
    values: Float[Tensor, " sequence"], part: SequenceMicroBatch
) -> tuple[Float[Tensor, " pair"], Float[Tensor, " pair"]]:
    """Split values into those of chosen and of rejected completions. Raises NapkinError for examples that are not
    pairs."""
    for number, example in zip(part.example_numbers, part.examples, strict=True):
        if len(example) != 2 or not all(sequence.n_trained for sequence in example):
            raise NapkinError(
                f"example {number} has {len(example)} sequences, of which "
                f"{sum(not sequence.n_trained for sequence in example)} count no token: give pairs of a chosen and a "
                "rejected completion"
            )
    pairs = values.view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _of_completions(terms: Tensor, part: SequenceMicroBatch, per_token: bool) -> Tensor:
    sums = sums_of_sequences(terms, part)
    return sums / trained_tokens_of_sequences(part).clamp(min=1) if per_token else sums


# KTO. An example of the data is (completion, mismatched): `mismatched` is the completion's prompt with another prompt's
# completion. Before a step, `with_kl_estimate` makes of the mismatched completions of the whole batch one estimate of
# the divergence from the reference, and leaves examples of one: a gradient does not depend on how they are divided into
# micro-batches.

DESIRABLE = "desirable"
"""The name in `TokenSequence.values` of a completion's label, 1.0 or 0.0 at each token."""
_KL, _ALIKE = "kl", "answers_alike"


def with_kl_estimate(examples: Sequence[Example], mismatched_ratios: Sequence[float]) -> Sequence[Example]:
    """Turn a whole batch of (completion, mismatched) into examples of the completion alone, which carry the batch's
    estimate.

    It is max(0, mean of `mismatched_ratios`), which are log π - log π_ref of the second sequences, as the objective
    takes a completion's: sums, or means per token (Ethayarajh et al. 2024, section 4.1).
    """
    kl = max(0.0, float(np.mean(mismatched_ratios)))
    labels = [bool(completion.values[DESIRABLE][0]) for completion, _ in examples]

    def with_constants(example: Example) -> Example:
        completion, n = example[0], example[0].n_trained
        alike = labels.count(bool(completion.values[DESIRABLE][0]))
        return (completion.with_values(**{_KL: np.full(n, kl, "f4"), _ALIKE: np.full(n, alike, "f4")}),)

    return MappedExamples(examples, with_constants)


def mismatched_number(runs: Sequence[int] | NDArray[np.int64], number: int, *, is_closed: bool) -> int:
    """The number of the example whose completion is put to the prompt of example `number`: the next with another
    prompt.

    `runs` gives each example the number of its run of neighbours with the same prompt, from 0 on; `is_closed` is
    whether the last run continues with the first. Where all prompts are equal it is the next example: then the estimate
    is of matching completions.
    """
    n = len(runs)
    end = bisect_right(runs, runs[number])
    if end == n and is_closed:
        end = bisect_right(runs, 0)
        return (number + 1) % n if end == n else end
    return end % n


@dataclass(frozen=True)
class KTOObjective:
    """`kto_losses` of examples that `with_kl_estimate` has made."""

    beta: float
    per_token: bool = False
    """True for the mean over a completion's tokens instead of the sum."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        """Average the losses; reward metrics are means over the desirable and over the undesirable completions."""
        ratios = completion_log_ratios(part, scores, per_token=self.per_token)
        desirable, kl, alike = (last_of_completions(values_of(part, name), part) for name in (DESIRABLE, _KL, _ALIKE))
        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        losses = kto_losses(ratios, desirable, kl, beta=self.beta, **weights)
        n = max(totals.examples, 1)
        ahead = ratios.detach() - kl
        rewards = self.beta * ratios.detach() / alike.clamp(min=1)
        metrics = {
            "accuracy": ((ahead > 0).float() * desirable + (ahead < 0).float() * (1 - desirable)).sum() / n,
            "margin": ((2 * desirable - 1) * rewards).sum(),
            "chosen_reward": (desirable * rewards).sum(),
            "rejected_reward": ((1 - desirable) * rewards).sum(),
            "kl": kl.sum() / n,
        }
        return losses.sum() / n, metrics


def rewarded(sequence: TokenSequence) -> TokenSequence:
    """Append a token to a sequence and mask all others: a reward model's reward is read there."""
    tokens = np.append(sequence.tokens, PADDING)
    return TokenSequence(tokens, np.arange(len(tokens)) == len(tokens) - 1)


@dataclass(frozen=True)
class RewardObjective:
    """`bradley_terry_losses` of pairs whose sequences `rewarded` has made, by a model with a scalar head."""

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        if scores.scalars is None:
            raise NapkinError("the model has no scalar head, which rewards are read from: add one with add_scalar_head")
        chosen, rejected = pairs_of(last_of_completions(scores.scalars, part), part)
        loss = bradley_terry_losses(chosen, rejected).sum() / max(totals.examples, 1)
        return loss, pair_metrics(chosen, rejected, totals)


# How well calibrated a reward model is. A pair's winner is known, and which of its completions is named first is
# arbitrary. So a pair counts by the completion that the model prefers: its probability is at least a half, and it is
# right or wrong.


@dataclass(frozen=True)
class ReliabilityBin:
    """Pairs whose preferred completion has a probability in one interval."""

    low: float
    high: float
    pairs: int
    probability: float
    """The mean of the model's probabilities."""
    right: float
    """The share of pairs whose chosen completion is the preferred one; an even pair is half right."""


@dataclass(frozen=True)
class Calibration:
    """The reliability of P(chosen wins) on some pairs."""

    bins: tuple[ReliabilityBin, ...]
    """The bins that hold pairs, by their probability."""
    pairs: int
    accuracy: float
    loss: float
    """The mean of -log P(chosen wins), in nats; log 2 for a model without an opinion."""
    expected_error: float
    """Mean over pairs of |probability - share right| of their bin: the expected calibration error (Naeini et al.
    2015)."""

    def lines(self) -> list[str]:
        """A summary, and a line per bin."""
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
    reliability = tuple(
        ReliabilityBin(
            low=0.5 + 0.5 * number / bins,
            high=0.5 + 0.5 * (number + 1) / bins,
            pairs=int(own.sum()),
            probability=float(confidence[own].mean()),
            right=float(right[own].mean()),
        )
        for number in np.unique(numbers).tolist()
        for own in [numbers == number]
    )
    error = sum(each.pairs * abs(each.probability - each.right) for each in reliability) / len(differences)
    loss = float(np.logaddexp(0, -differences).mean())
    return Calibration(reliability, len(differences), float(right.mean()), loss, float(error))
