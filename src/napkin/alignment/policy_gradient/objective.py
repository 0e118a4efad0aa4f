"""The loss of a policy: terms of tokens by the algorithm's parts, penalties, and a value head's loss."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.alignment.objective import (
    REFERENCE,
    BatchTotals,
    Figures,
    counts_of_sequences,
    normalised_sum,
    normalised_weights,
    sums_of_sequences,
    values_of,
)
from napkin.alignment.policy_gradient.algorithms import PolicyParts, parts_of
from napkin.alignment.policy_gradient.clipping import pessimistic_terms, plain_terms, weighted_terms
from napkin.alignment.policy_gradient.kl import divergence_terms
from napkin.alignment.policy_gradient.ratios import sequence_ratios, token_ratios, truncated_sampler_ratios
from napkin.alignment.sequence_packing import SequenceMicroBatch
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.recipe.reinforcement_config import ReinforcementConfig


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
