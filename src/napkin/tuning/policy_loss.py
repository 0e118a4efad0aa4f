"""The loss of a policy on batches: rewards become advantages of tokens, and these become terms of the loss.

The formulas are in `policy_gradient.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from torch import Tensor

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.recipe.tuning_recipe import ReinforcementConfig
from napkin.tuning.objective import (
    REFERENCE,
    BatchTotals,
    Metrics,
    normalised_sum,
    normalised_weights,
    sums_of_sequences,
    trained_tokens_of_sequences,
    values_of,
)
from napkin.tuning.packing import SequenceMicroBatch
from napkin.tuning.policy_gradient import (
    ADVANTAGES,
    PRESETS,
    PolicyParts,
    divergence_terms,
    generalised_advantages,
    has_equal_rewards,
    overlong_penalty,
    pessimistic_terms,
    plain_terms,
    sequence_ratios,
    token_ratios,
    truncated_sampler_ratios,
    weighted_terms,
)

OLD, SAMPLER, OLD_VALUES = "old_log_probabilities", "sampler_log_probabilities", "old_values"
"""Names in `TokenSequence.values`, each from before the first update: the trainer's log-probabilities, those that
tokens were sampled with, and the value head's predictions."""


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
    """The divisor of a completion's sum under normalisation "constant"."""
    kl_weight: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_weight: float = 0.0
    value_weight: float = 0.5
    value_clip: float = 0.2
    """The largest change of a value from its old one that is rewarded; 0 is no limit."""
    sampler_ratio_limit: float = 0.0
    """The limit of the weight old / sampler; 0 is no correction."""

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        def normalised(terms: Float[Tensor, " token"]) -> Float[Tensor, ""]:
            return normalised_sum(terms, part, totals, self.parts.normalisation, self.constant)

        terms, means = self._policy_terms(part, scores)
        policy_loss = normalised(terms.detach())
        if self.kl_weight:
            reference = values_of(part, REFERENCE)
            means["kl"] = divergence_terms(scores.log_probabilities, reference, self.kl_estimator)
            terms = terms + self.kl_weight * means["kl"]
        means["entropy"] = scores.entropies
        if self.entropy_weight:
            terms = terms - self.entropy_weight * scores.entropies
        loss = normalised(terms)
        n_tokens = max(totals.tokens, 1)
        if self.parts.advantage == "gae":
            means["value_loss"] = self._value_terms(part, scores)
            loss = loss + self.value_weight * means["value_loss"].sum() / n_tokens
        metrics = {name: values.detach().sum() / n_tokens for name, values in means.items()}
        metrics["policy_loss"] = policy_loss
        if "ratio_mean" in means:
            # Without tokens there is no largest: 0 is below all ratios.
            ratios = means["ratio_mean"].detach()
            metrics["ratio_max"] = torch.cat([ratios, ratios.new_zeros(1)]).max()
        return loss, metrics

    def fresh_coefficients(self, part: SequenceMicroBatch, totals: BatchTotals) -> Float[Tensor, " token"] | None:
        """The gradient of the loss with respect to the log-probabilities, where these are the old ones: ratios are 1,
        and no limit acts. None where other terms than the policy's contribute."""
        if self.kl_weight or self.entropy_weight or self.sampler_ratio_limit or self.parts.advantage == "gae":
            return None
        weights = normalised_weights(part, totals, self.parts.normalisation, self.constant)
        slopes = -values_of(part, "advantages") * weights
        if self.parts.ratio != "sequence":
            return slopes
        # The ratio of all tokens of a completion is the mean of their logarithms.
        means = sums_of_sequences(slopes, part) / trained_tokens_of_sequences(part).clamp(min=1)
        return means[part.sequence]

    def _policy_terms(self, part: SequenceMicroBatch, scores: TokenScores) -> tuple[Float[Tensor, " token"], Metrics]:
        """Each token's term, and metrics that are means over tokens."""
        parts, logprobs, advantages = self.parts, scores.log_probabilities, values_of(part, "advantages")
        means: Metrics = {}
        if parts.ratio == "none":
            terms = plain_terms(logprobs, advantages)
        else:
            old = values_of(part, OLD)
            if parts.ratio == "token":
                ratios = token_ratios(logprobs, old)
            else:
                ratios = sequence_ratios(logprobs, old, part.sequence, part.n_sequences)
            limited = torch.zeros_like(ratios, dtype=torch.bool)
            if parts.clip == "ppo":
                terms, limited = pessimistic_terms(ratios, advantages, low=parts.clip_low, high=parts.clip_high)
            elif parts.clip == "cispo":
                terms, limited = weighted_terms(logprobs, ratios, advantages, low=parts.clip_low, high=parts.clip_high)
            else:
                terms = plain_terms(ratios, advantages)
            means |= {"ratio_mean": ratios, "clip_share": limited.float()}
        if self.sampler_ratio_limit:
            old, sampler = values_of(part, OLD), values_of(part, SAMPLER)
            terms = terms * truncated_sampler_ratios(old, sampler, self.sampler_ratio_limit)
        return terms, means

    def _value_terms(self, part: SequenceMicroBatch, scores: TokenScores) -> Float[Tensor, " token"]:
        """max((V - R)², (V_clipped - R)²) / 2, where V_clipped is within value_clip of the old value: the value loss of
        PPO's published code (Huang et al. 2022, detail 9)."""
        if scores.scalars is None:
            raise NapkinError("the model has no value head, which ppo trains: add one, or use another rl.algorithm")
        returns = values_of(part, "returns")
        errors = (scores.scalars - returns).square()
        if self.value_clip:
            old = values_of(part, OLD_VALUES)
            held = old + (scores.scalars - old).clamp(-self.value_clip, self.value_clip)
            errors = torch.maximum(errors, (held - returns).square())
        return errors / 2


@dataclass(frozen=True)
class FreshObjective:
    """An objective on completions that the same weights have just sampled: old log-probabilities are those of this
    pass.

    Adds the metrics of the gap between the log-probabilities that tokens were sampled with and these.
    """

    objective: PolicyObjective

    def coefficients(self, part: SequenceMicroBatch, totals: BatchTotals) -> Float[Tensor, " token"] | None:
        return self.objective.fresh_coefficients(part, totals)

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        old = scores.log_probabilities.detach()
        loss, metrics = self.objective.loss(replace(part, values={**part.values, OLD: old}), scores, totals)
        if scores.weighted_sum is not None:
            # Its gradient is the loss's, its value not.
            loss = loss + (scores.weighted_sum - scores.weighted_sum.detach())
        gap = sampler_gap(part.values[SAMPLER].to(old.dtype), old)
        n_tokens = max(totals.tokens, 1)
        means = {name: values.sum() / n_tokens for name, values in gap.items()}
        return loss, {**metrics, **means, "sampler_gap_max": torch.cat([gap["sampler_gap"], old.new_zeros(1)]).max()}


def sampler_gap(sampler: Float[Tensor, " token"], trainer: Float[Tensor, " token"]) -> dict[str, Tensor]:
    """|log p(sampler) - log p(trainer)| of each token, and its part of KL(sampler ‖ trainer) by k3 (Schulman 2020)."""
    ahead = trainer - sampler
    return {"sampler_gap": ahead.abs(), "sampler_kl": ahead.expm1() - ahead}


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


def parts_of(config: ReinforcementConfig) -> PolicyParts:
    """The parts of a recipe's algorithm: those that the recipe names, and the preset's for the others.

    Raises NapkinError for parts that contradict each other.
    """
    preset = PRESETS[config.algorithm]
    names = [each.name for each in fields(PolicyParts) if hasattr(config, each.name)]
    chosen = {name: getattr(config, name) for name in names if getattr(config, name) not in ("auto", None)}
    if config.ratio == "none" and config.clip == "auto":
        chosen["clip"] = "none"
    parts = replace(preset, **chosen)
    if parts.ratio == "none" and parts.clip != "none":
        raise NapkinError(f"rl.clip is '{parts.clip}', and without a ratio there is nothing to clip: set rl.ratio")
    if (parts.advantage == "gae") != (config.algorithm == "ppo"):
        raise NapkinError(
            f"rl.advantage is '{parts.advantage}' and rl.algorithm '{config.algorithm}': gae reads the value head, "
            "which only ppo has, and ppo trains it for nothing else: leave rl.advantage at auto"
        )
    if parts.only_rewarded and parts.advantage != "none":
        raise NapkinError(
            f"rl.advantage is '{parts.advantage}', and expert-iteration gives all rewarded completions one weight: "
            "leave it at auto, or use rl.algorithm reinforce"
        )
    if config.group_size == 1 and parts.advantage in ("group", "group mean", "leave one out"):
        raise NapkinError(
            f"rl.group_size is 1, and rl.advantage '{parts.advantage}' compares the completions of a group: use 2 "
            "or more, or rl.advantage batch"
        )
    if parts.clip_low >= 1 and parts.clip == "ppo":
        raise NapkinError(f"rl.clip_low is {parts.clip_low}, and no ratio is below 0: use a number below 1")
    return parts


@dataclass(frozen=True, eq=False)
class Credit:
    """The advantages of the completions of a batch, and which completions are trained on."""

    advantages: Float[Tensor, "group completion"]
    """The advantage of all tokens of a completion; with gae the reward that its last token gets."""
    trained_on: Bool[Tensor, "group completion"]
    """Completions that are trained on; the others are left out of all counts."""
    rewards: Float[Tensor, "group completion"]
    """Rewards with the penalty for length, if there is one."""
    equal_groups: int
    """Groups whose completions all had the same reward, before a penalty."""


def advantages_of(
    config: ReinforcementConfig,
    rewards: ArrayLike,
    lengths: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    prompts: Sequence[str] = (),
) -> Credit:
    """Turn the rewards of completions into advantages.

    All arrays are of shape [group, completion]: rewards, in float64; lengths in tokens; and whether a completion was
    truncated, by default if it is as long as it may be. `prompts` name the groups in errors. Raises NapkinError for a
    reward that is not a finite number.
    """
    parts = parts_of(config)
    given = torch.as_tensor(np.asarray(rewards, dtype=np.float64))
    sizes = torch.as_tensor(np.asarray(lengths, dtype=np.int64))
    is_truncated = (
        sizes >= config.max_answer if truncated is None else torch.as_tensor(np.asarray(truncated, dtype=bool))
    )
    for group, completion in (~given.isfinite()).nonzero().tolist():
        name = f" '{prompts[group][:60]}'" if prompts else ""
        raise NapkinError(
            f"the reward of completion {completion + 1} to prompt {group + 1}{name} is "
            f"{float(given[group, completion])}: let the reward be a finite number"
        )
    equal = has_equal_rewards(given)
    shaped = given
    if parts.overlong == "penalty":
        # A truncated completion would have been longer still.
        reached = torch.where(is_truncated, config.max_answer, sizes)
        shaped = given + overlong_penalty(reached, max_length=config.max_answer, window=overlong_window(config))
    trained_on = torch.ones_like(given, dtype=torch.bool)
    if parts.drop_equal_groups:
        trained_on &= ~equal[:, None]
    if parts.overlong == "mask":
        trained_on &= ~is_truncated
    if parts.only_rewarded:
        trained_on &= given > 0
    advantages = torch.ones_like(shaped) if parts.only_rewarded else ADVANTAGES[parts.advantage](shaped)
    return Credit(advantages, trained_on, shaped, int(equal.sum()))


def overlong_window(config: ReinforcementConfig) -> int:
    """The tokens before the longest completion over which DAPO's penalty rises; by default a fifth, as in its section
    4."""
    return min(config.overlong_window or max(config.max_answer // 5, 1), config.max_answer)


def trained_examples(
    config: ReinforcementConfig, groups: Sequence[Sequence[TokenSequence]], credit: Credit
) -> list[list[Example]]:
    """The completions of each group that are trained on, with "advantages" of their tokens; with gae, "returns" too.

    `groups[g][c]` is completion c of prompt g, with a loss mask of its own tokens; with gae it has "old_values". Groups
    may be left empty.
    """
    parts = parts_of(config)
    return [
        [
            (_with_credit(parts, config, completion, float(credit.advantages[g, c])),)
            for c, completion in enumerate(group)
            if credit.trained_on[g, c]
        ]
        for g, group in enumerate(groups)
    ]


def _with_credit(
    parts: PolicyParts, config: ReinforcementConfig, completion: TokenSequence, advantage: float
) -> TokenSequence:
    if parts.advantage != "gae":
        return completion.with_values(advantages=np.full(completion.n_trained, advantage, np.float32))
    if OLD_VALUES not in completion.values:
        raise NapkinError(
            "a completion has no 'old_values', which rl.advantage gae reads: give those of the value head"
        )
    values = torch.as_tensor(completion.values[OLD_VALUES], dtype=torch.float64)
    rewards = torch.zeros_like(values)
    rewards[-1:] = advantage
    advantages = generalised_advantages(rewards, values, decay=config.gae_lambda)
    return completion.with_values(
        advantages=advantages.numpy().astype(np.float32), returns=(advantages + values).numpy().astype(np.float32)
    )
