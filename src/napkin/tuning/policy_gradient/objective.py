"""The loss of a policy: terms of tokens by the algorithm's parts, penalties, and a value head's loss."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.recipe.tuning_recipe import ReinforcementConfig
from napkin.tuning.objective import (
    REFERENCE,
    BatchTotals,
    Figures,
    counts_of_sequences,
    normalised_sum,
    normalised_weights,
    sums_of_sequences,
    values_of,
)
from napkin.tuning.packing import SequenceMicroBatch
from napkin.tuning.policy_gradient.algorithms import PolicyParts, parts_of

# FOLD tuning/policy_gradient/objective.py
# What limits a step away from the policy that answered: the terms of a policy's loss, one for each token.
#
# Each function returns the terms, and at which tokens the limit acts.

Tokens = Float[Tensor, " token"]
Limited = Bool[Tensor, " token"]


def plain_terms(weights: Tokens, advantages: Tokens) -> Tokens:
    """-w · A, where w is a ratio (Schulman et al. 2017, equation 6) or a log-probability, as in REINFORCE."""
    return -weights * advantages


def pessimistic_terms(ratios: Tokens, advantages: Tokens, *, low: float, high: float) -> tuple[Tokens, Limited]:
    """-min(rho · A, clip(rho, 1 - low, 1 + high) · A): PPO (Schulman et al. 2017, equation 7); high > low is DAPO's
    clip-higher (Yu et al. 2025, equation 10).

    Where the clipped product is the smaller the term has no gradient; a step back is never limited.
    """
    plain = ratios * advantages
    clipped = ratios.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def weighted_terms(
    log_probabilities: Tokens, ratios: Tokens, advantages: Tokens, *, low: float, high: float
) -> tuple[Tokens, Limited]:
    """-stop(clip(rho, 1 - low, 1 + high)) · A · log pi: CISPO (MiniMax 2025, equations 4 and 5).

    The ratio is a weight without gradient, so that every token keeps one. low = 1 or more is no lower bound.
    """
    weights = ratios.detach().clamp(1 - low, 1 + high)
    return -weights * advantages * log_probabilities, weights != ratios


# FOLD tuning/policy_gradient/objective.py
# Estimates of the divergence KL(pi ‖ reference) from tokens that pi has drawn (Schulman 2020, "Approximating KL").
#
# With d = log pi(token) - log reference(token):
#
#     estimate   value            bias and variance            expected gradient
#     k1         d                unbiased, large              that of KL(pi ‖ reference)
#     k2         d² / 2           biased, small                that of KL(pi ‖ reference)
#     k3         exp(-d) - 1 + d  unbiased, small, never < 0   that of KL(reference ‖ pi)
#
# The derivative of k1's own value is 0 in expectation, and would be noise as a penalty. Its gradient here is therefore
# that of a reward of -d, d · grad log pi, which is also k2's; all three are in Tang & Munos 2025.


def divergence_terms(
    log_probabilities: Tokens, reference_log_probabilities: Tokens, estimator: Literal["k1", "k2", "k3"]
) -> Tokens:
    """An estimate of the divergence at each token, in nats; values and gradients are those of the table above."""
    difference = log_probabilities - reference_log_probabilities
    if estimator == "k3":
        return (-difference).exp() - 1 + difference
    half_square = difference.square() / 2
    return half_square if estimator == "k2" else half_square + (difference - half_square).detach()


# FOLD tuning/policy_gradient/objective.py
# Importance ratios: the probability of a token now over that when it was drawn.


def token_ratios(log_probabilities: Tokens, old_log_probabilities: Tokens) -> Tokens:
    """pi(token) / pi_old(token), as in PPO (Schulman et al. 2017, equation 6)."""
    return (log_probabilities - old_log_probabilities).exp()


def sequence_ratios(
    log_probabilities: Tokens, old_log_probabilities: Tokens, sequence: Int[Tensor, " token"], n_sequences: int
) -> Tokens:
    """(pi(answer) / pi_old(answer))^(1/length), the geometric mean of the tokens' ratios, for each token of the answer:
    GSPO (Zheng et al. 2025, equation 7).

    `sequence` is the number of each token's sequence. The gradient reaches all tokens of the sequence.
    """
    differences = log_probabilities - old_log_probabilities
    none = torch.zeros(n_sequences, dtype=differences.dtype, device=differences.device)
    sums = none.index_add(0, sequence, differences)
    lengths = none.index_add(0, sequence, torch.ones_like(differences))
    return (sums / lengths.clamp(min=1)).exp()[sequence]


def truncated_sampler_ratios(
    old_log_probabilities: Tokens, sampler_log_probabilities: Tokens, limit: float
) -> Float[Tensor, " token"]:
    """min(pi_old / pi_sampler, limit): a weight that corrects for a sampler whose arithmetic is not the trainer's
    (truncated importance sampling: Ionides 2008; Yao et al. 2025). Without gradient."""
    return (old_log_probabilities - sampler_log_probabilities).exp().clamp(max=limit).detach()


@dataclass(frozen=True)
class PolicyObjective:
    """Mean of -advantage · (ratio or log-probability), limited by the clip, plus kl_weight · KL(policy ‖ reference),
    minus entropy_weight · entropy, plus value_weight · the value head's squared error.

    Reads of each sequence, for each token that counts: "advantages"; with a ratio "old_log_probabilities"; with a
    kl_weight "reference_log_probabilities"; with a sampler_ratio_limit "sampler_log_probabilities" and
    "old_log_probabilities"; with a value head "returns" and "old_values".

    Figures: policy_loss, normalised as the loss is; kl and entropy in nats, clip_share, ratio_mean and value_loss,
    means of the batch's tokens; ratio_max.
    """

    parts: PolicyParts
    constant: float
    """By which normalisation "constant" divides an answer's sum."""
    kl_weight: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_weight: float = 0.0
    value_weight: float = 0.5
    value_clip: float = 0.2
    """By how much a value may differ from its old one before it is held back; 0 is no limit."""
    sampler_ratio_limit: float = 0.0
    """Of the weight old / sampler; 0 is no correction."""

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Figures]:
        """See `Objective`."""
        terms, means = self._policy_terms(part, scores)
        policy_loss = self._normalised(terms.detach(), part, totals)
        if self.kl_weight:
            reference = values_of(part, REFERENCE)
            means["kl"] = divergence_terms(scores.log_probabilities, reference, self.kl_estimator)
            terms = terms + self.kl_weight * means["kl"]
        means["entropy"] = scores.entropies
        if self.entropy_weight:
            terms = terms - self.entropy_weight * scores.entropies
        loss = self._normalised(terms, part, totals)
        n_tokens = max(totals.tokens, 1)
        if self.parts.advantage == "gae":
            means["value_loss"] = self._value_terms(part, scores)
            loss = loss + self.value_weight * means["value_loss"].sum() / n_tokens
        figures = {name: values.detach().sum() / n_tokens for name, values in means.items()}
        figures["policy_loss"] = policy_loss
        if "ratio_mean" in means:
            # Without tokens there is no largest: 0 is below all ratios.
            ratios = means["ratio_mean"].detach()
            figures["ratio_max"] = torch.cat([ratios, ratios.new_zeros(1)]).max()
        return loss, figures

    def fresh_coefficients(self, part: SequenceMicroBatch, totals: BatchTotals) -> Float[Tensor, " token"] | None:
        """The gradient of the loss with respect to the log-probabilities, where these are the old ones: ratios are 1,
        and no limit acts. None where more than the policy's terms has a part in it."""
        if self.kl_weight or self.entropy_weight or self.sampler_ratio_limit or self.parts.advantage == "gae":
            return None
        weights = normalised_weights(part, totals, self.parts.normalisation, self.constant)
        slopes = -values_of(part, "advantages") * weights
        if self.parts.ratio != "sequence":
            return slopes
        # The ratio of all tokens of an answer is the mean of their logarithms.
        means = sums_of_sequences(slopes, part) / counts_of_sequences(part).clamp(min=1)
        return means[part.sequence]

    def _policy_terms(self, part: SequenceMicroBatch, scores: TokenScores) -> tuple[Float[Tensor, " token"], Figures]:
        """Each token's term, and figures that are means of tokens."""
        parts, logprobs, advantages = self.parts, scores.log_probabilities, values_of(part, "advantages")
        means: Figures = {}
        if parts.ratio == "none":
            terms = plain_terms(logprobs, advantages)
        else:
            ratios = self._ratios(part, logprobs)
            limited = torch.zeros_like(ratios, dtype=torch.bool)
            if parts.clip == "ppo":
                terms, limited = pessimistic_terms(ratios, advantages, low=parts.clip_low, high=parts.clip_high)
            elif parts.clip == "cispo":
                terms, limited = weighted_terms(logprobs, ratios, advantages, low=parts.clip_low, high=parts.clip_high)
            else:
                terms = plain_terms(ratios, advantages)
            means |= {"ratio_mean": ratios, "clip_share": limited.float()}
        if self.sampler_ratio_limit:
            old, sampler = values_of(part, "old_log_probabilities"), values_of(part, "sampler_log_probabilities")
            terms = terms * truncated_sampler_ratios(old, sampler, self.sampler_ratio_limit)
        return terms, means

    def _ratios(self, part: SequenceMicroBatch, logprobs: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
        old = values_of(part, "old_log_probabilities")
        if self.parts.ratio == "token":
            return token_ratios(logprobs, old)
        return sequence_ratios(logprobs, old, part.sequence, part.n_sequences)

    def _value_terms(self, part: SequenceMicroBatch, scores: TokenScores) -> Float[Tensor, " token"]:
        """max((V - R)², (V_clipped - R)²) / 2, where V_clipped is within value_clip of the old value: the value loss of
        PPO's published code (Huang et al. 2022, detail 9)."""
        if scores.scalars is None:
            raise NapkinError("the model has no value head, which ppo trains: add one, or use another rl.algorithm")
        returns = values_of(part, "returns")
        errors = (scores.scalars - returns).square()
        if self.value_clip:
            old = values_of(part, "old_values")
            held = old + (scores.scalars - old).clamp(-self.value_clip, self.value_clip)
            errors = torch.maximum(errors, (held - returns).square())
        return errors / 2

    def _normalised(
        self, terms: Float[Tensor, " token"], part: SequenceMicroBatch, totals: BatchTotals
    ) -> Float[Tensor, ""]:
        return normalised_sum(terms, part, totals, self.parts.normalisation, self.constant)


def policy_objective(config: ReinforcementConfig) -> PolicyObjective:
    """The objective of a recipe's algorithm. Raises NapkinError for parts that contradict each other."""
    return PolicyObjective(
        parts=parts_of(config),
        constant=float(config.max_answer),
        kl_weight=config.kl_weight,
        kl_estimator=config.kl_estimator,
        entropy_weight=config.entropy_weight,
        value_weight=config.value_weight,
        value_clip=config.value_clip,
        sampler_ratio_limit=config.sampler_ratio_limit,
    )
