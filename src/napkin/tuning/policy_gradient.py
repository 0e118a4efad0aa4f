"""Policy gradients on one page: a model is trained on rewards of its own completions.

Each token of a completion with reward r, advantage A and probability π adds a term to the loss:

    A     = r - what was to be expected, of the group, the batch or a value head      advantage
    ρ     = π / π_old, of the token or the geometric mean over the completion         ratio
    term  = -min(ρ A, clip(ρ, 1 - low, 1 + high) A)                                   clip
    loss  = Σ term / N, N of tokens, sequences or a constant                          normalisation
          + kl_weight · KL(π ‖ reference) - entropy_weight · entropy                  divergence

`PRESETS` says which algorithm takes which of these parts. The functions are on tensors alone; `PolicyObjective`, behind
them, applies them to batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.errors import NapkinError
from napkin.model.transformer import TokenScores
from napkin.recipe.tuning_recipe import PolicyAlgorithm, ReinforcementConfig, SamplerCorrection
from napkin.tuning.packing import SequenceMicroBatch
from napkin.tuning.sampler_correction import sampler_gap, sampler_weights
from napkin.tuning.sequence_step import (
    REFERENCE,
    BatchTotals,
    Metrics,
    Normalisation,
    normalised_sum,
    normalised_weights,
    sums_of_sequences,
    trained_tokens_of_sequences,
    values_of,
)

Tokens = Float[Tensor, " token"]
Limited = Bool[Tensor, " token"]
"""True at tokens where a limit acts."""
Rewards = Float[Tensor, "group completion"]
"""Rewards of completions, a group for each prompt."""


@dataclass(frozen=True)
class PolicyParts:
    """The parts of an algorithm; see `ReinforcementConfig` for what each means."""

    advantage: Literal["group", "group mean", "group success", "leave one out", "batch", "none", "gae"]
    ratio: Literal["token", "sequence", "none"]
    clip: Literal["ppo", "cispo", "none"]
    normalisation: Normalisation
    clip_low: float = 0.2
    clip_high: float = 0.2
    drop_equal_groups: bool = False
    redraws: int = 0
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    only_rewarded: bool = False
    """True to train only on completions with a reward above 0, with one weight for all."""


PRESETS: dict[PolicyAlgorithm, PolicyParts] = {
    # Anthony et al. 2017; for language models Zelikman et al. 2022 (STaR): fine-tuning on the right answers.
    "expert-iteration": PolicyParts("none", "none", "none", "token", only_rewarded=True),
    # Williams 1992. A sum over tokens and a mean over completions is the expected reward's gradient, so a constant
    # divides.
    "reinforce": PolicyParts("batch", "none", "none", "constant"),
    # Kool et al. 2019; Ahmadian et al. 2024.
    "rloo": PolicyParts("leave one out", "none", "none", "constant"),
    # Schulman et al. 2017, equation 7 and table 1.
    "ppo": PolicyParts("gae", "token", "ppo", "token"),
    # Shao et al. 2024, equation 3; the clip range is PPO's.
    "grpo": PolicyParts("group", "token", "ppo", "sequence"),
    # Liu et al. 2025, section 3.2: GRPO without the divisions by standard deviation and length.
    "dr-grpo": PolicyParts("group mean", "token", "ppo", "constant"),
    # Yu et al. 2025, sections 3.1 to 3.4 and 4.1; its published recipes draw ten batches at most.
    "dapo": PolicyParts(
        "group", "token", "ppo", "token", 0.2, 0.28, drop_equal_groups=True, redraws=9, overlong="penalty"
    ),
    # MiniMax 2025, equations 4 and 5: no lower bound. The upper one, a ratio of 5, is of Khatri et al. 2025 (ScaleRL).
    "cispo": PolicyParts("group", "token", "cispo", "token", 1.0, 4.0),
    # Zheng et al. 2025, equations 5 to 7 and section 5.1.
    "gspo": PolicyParts("group", "sequence", "ppo", "sequence", 3e-4, 4e-4),
    # Tajwar et al. 2026: a sum over tokens and a mean over completions, as in REINFORCE; the clip is PPO's.
    "maxrl": PolicyParts("group success", "token", "ppo", "constant"),
}


# Advantages: how much better a completion's reward is than what was to be expected. A baseline that does not depend on
# the completion leaves the expected gradient as it is and lowers its variance (Williams 1992).

EPSILON = 1e-4
"""Added to a group's standard deviation, so that rewards which are nearly equal are not blown up: where they differ by
1e-5, advantages stay below 0.1. The value is that of TRL's GRPOTrainer; the papers name none."""


def group_normalised(rewards: Rewards, *, epsilon: float = EPSILON) -> Rewards:
    """(r - mean) / (std + epsilon) of each group, as in GRPO (Shao et al. 2024, section 4.1.2).

    The standard deviation is the sample's, with n - 1. Groups of equal rewards, and so of one completion, get 0.
    """
    if rewards.shape[1] == 1:
        return torch.zeros_like(rewards)
    normalised = less_group_mean(rewards) / (rewards.std(dim=1, keepdim=True) + epsilon)
    # A mean of equal numbers may differ from them in its last bit.
    return normalised.masked_fill(has_equal_rewards(rewards)[:, None], 0.0)


def less_group_mean(rewards: Rewards) -> Rewards:
    """r - mean of each group, as in Dr. GRPO (Liu et al. 2025, section 3.2).

    The mean holds r itself, so the expected gradient is (1 - 1/n) times that of the expected reward.
    """
    return rewards - rewards.mean(dim=1, keepdim=True)


def relative_to_success(rewards: Rewards) -> Rewards:
    """(r - mean) / mean of each group, 0 where nothing was rewarded: MaxRL (Tajwar et al. 2026).

    With rewards of 0 and 1 the mean is the share of successes, and the expected gradient is that of the sum of
    pass@k / k for k below n, which grows towards that of the logarithm of the probability of success. Raises
    NapkinError for rewards below 0, of which no mean is a share of successes.
    """
    if bool((rewards < 0).any()):
        raise NapkinError(
            f"a reward is {float(rewards.min()):g}, and rl.advantage 'group success' divides by the group's mean, the "
            "share of successes: let rewards be 0 or more, without rl.overlong 'penalty', or use 'group'"
        )
    means = rewards.mean(dim=1, keepdim=True)
    advantages = less_group_mean(rewards) / means.clamp(min=torch.finfo(rewards.dtype).tiny)
    return advantages.masked_fill(has_equal_rewards(rewards)[:, None], 0.0)


def less_mean_of_others(rewards: Rewards) -> Rewards:
    """r - mean of the other completions of the group: RLOO (Kool et al. 2019; Ahmadian et al. 2024).

    Unbiased. Raises NapkinError for groups of one, which have no others.
    """
    n = rewards.shape[1]
    if n == 1:
        raise NapkinError("a group of 1 completion has no others to compare it with: use groups of 2 or more")
    return less_group_mean(rewards) * (n / (n - 1))


def less_batch_mean(rewards: Rewards) -> Rewards:
    """r - mean of all completions of the batch, REINFORCE's baseline (Williams 1992)."""
    return rewards - rewards.mean()


ADVANTAGES: dict[str, Callable[[Rewards], Rewards]] = {
    "group": group_normalised,
    "group mean": less_group_mean,
    "group success": relative_to_success,
    "leave one out": less_mean_of_others,
    "batch": less_batch_mean,
    "none": lambda rewards: rewards,
    # The reward that a completion's last token gets: `generalised_advantages` divides it among the tokens.
    "gae": lambda rewards: rewards,
}


def has_equal_rewards(rewards: Rewards) -> Bool[Tensor, " group"]:
    """True for groups whose rewards are all the same: such a group teaches nothing beside its own mean."""
    return (rewards == rewards[:, :1]).all(dim=1)


def generalised_advantages(
    rewards: Float[Tensor, " token"], values: Float[Tensor, " token"], *, decay: float, discount: float = 1.0
) -> Float[Tensor, " token"]:
    """Advantages of one completion's tokens (Schulman et al. 2016, equation 16), in float64.

    A_t = sum_k (discount · decay)^k · (r_{t+k} + discount · V_{t+k+1} - V_{t+k}), where V is 0 after the last token.
    values[t] is what was expected before token t; A + V are the returns that it is trained on.
    """
    advantages, advantage, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + discount * value_after - value + discount * decay * advantage
        value_after = value
        advantages.append(advantage)
    return torch.tensor(advantages[::-1], dtype=torch.float64)


def overlong_penalty(
    lengths: Int[Tensor, "group completion"], *, max_length: int, window: int
) -> Float[Tensor, "group completion"]:
    """DAPO's soft punishment, added to a reward (Yu et al. 2025, equation 13).

    0 up to max_length - window tokens, then evenly down to -1 at max_length.
    """
    return -((lengths.double() - (max_length - window)) / window).clamp(0, 1)


def token_ratios(log_probabilities: Tokens, old_log_probabilities: Tokens) -> Tokens:
    """pi(token) / pi_old(token), as in PPO (Schulman et al. 2017, equation 6)."""
    return (log_probabilities - old_log_probabilities).exp()


def sequence_ratios(
    log_probabilities: Tokens, old_log_probabilities: Tokens, sequence: Int[Tensor, " token"], n_sequences: int
) -> Tokens:
    """(pi(completion) / pi_old(completion))^(1/length), the geometric mean of the tokens' ratios, for each token of the
    completion: GSPO (Zheng et al. 2025, equation 7).

    `sequence` is the number of each token's sequence. The gradient reaches all tokens of the sequence.
    """
    differences = log_probabilities - old_log_probabilities
    none = torch.zeros(n_sequences, dtype=differences.dtype, device=differences.device)
    sums = none.index_add(0, sequence, differences)
    lengths = none.index_add(0, sequence, torch.ones_like(differences))
    return (sums / lengths.clamp(min=1)).exp()[sequence]


# Limits on a step away from the policy that generated the completions. Each function returns the terms, and at which
# tokens the limit acts.


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


# Estimates of the divergence KL(pi ‖ reference) from tokens sampled from pi (Schulman 2020, "Approximating KL").
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


# The loss on batches: rewards become advantages of tokens, and these become terms of the loss.

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

    Figures: policy_loss, normalised as the loss is; kl and entropy in nats, clip_share, ratio_mean, sampler_weight,
    sampler_limited_share and value_loss, means of the batch's tokens; ratio_max.
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
    """The limit C of the weight that corrects for the sampler; 0 is no correction."""
    sampler_correction: SamplerCorrection = "token"

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
            # Without tokens there is no maximum: 0 is below all ratios.
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
            where = part.sequence, part.n_sequences
            weights, limited = sampler_weights(self.sampler_correction, old, sampler, self.sampler_ratio_limit, *where)
            terms = terms * weights
            means |= {"sampler_weight": weights, "sampler_limited_share": limited.float()}
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
            clipped = old + (scores.scalars - old).clamp(-self.value_clip, self.value_clip)
            errors = torch.maximum(errors, (clipped - returns).square())
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
            # Its gradient equals the loss's, its value does not.
            loss = loss + (scores.weighted_sum - scores.weighted_sum.detach())
        gap = sampler_gap(part.values[SAMPLER].to(old.dtype), old)
        n_tokens = max(totals.tokens, 1)
        means = {name: values.sum() / n_tokens for name, values in gap.items()}
        return loss, {**metrics, **means, "sampler_gap_max": torch.cat([gap["sampler_gap"], old.new_zeros(1)]).max()}


def policy_objective(config: ReinforcementConfig) -> PolicyObjective:
    """The objective of a recipe's algorithm. Raises NapkinError for parts that contradict each other."""
    if config.sampler_correction == "token mask" and 0 < config.sampler_ratio_limit <= 1:
        raise NapkinError(
            f"rl.sampler_ratio_limit is {config.sampler_ratio_limit:g}, and rl.sampler_correction 'token mask' leaves "
            "out all ratios above it and below 1 over it: use a number above 1"
        )
    return PolicyObjective(
        parts=parts_of(config),
        constant=float(config.max_answer),
        kl_weight=config.kl_weight,
        kl_estimator=config.kl_estimator,
        entropy_weight=config.entropy_weight,
        value_weight=config.value_weight,
        value_clip=config.value_clip,
        sampler_ratio_limit=config.sampler_ratio_limit,
        sampler_correction=config.sampler_correction,
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
    if config.group_size == 1 and parts.advantage in ("group", "group mean", "group success", "leave one out"):
        raise NapkinError(
            f"rl.group_size is 1, and rl.advantage '{parts.advantage}' compares the completions of a group: use 2 "
            "or more, or rl.advantage batch"
        )
    if config.group_size == 1 and parts.redraws:
        raise NapkinError(
            f"rl.group_size is 1, and rl.redraws {parts.redraws} draws prompts again whose answers all had one reward, "
            "as those of a group of 1 have: use 2 or more, or rl.redraws 0"
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
    table = torch.as_tensor(np.asarray(rewards, dtype=np.float64))
    sizes = torch.as_tensor(np.asarray(lengths, dtype=np.int64))
    is_truncated = (
        sizes >= config.max_answer if truncated is None else torch.as_tensor(np.asarray(truncated, dtype=bool))
    )
    for group, completion in (~table.isfinite()).nonzero().tolist():
        name = f" '{prompts[group][:60]}'" if prompts else ""
        raise NapkinError(
            f"the reward of completion {completion + 1} to prompt {group + 1}{name} is "
            f"{float(table[group, completion])}: let the reward be a finite number"
        )
    equal = has_equal_rewards(table)
    shaped = table
    if parts.overlong == "penalty":
        # A truncated completion would have been longer still.
        reached = torch.where(is_truncated, config.max_answer, sizes)
        shaped = table + overlong_penalty(reached, max_length=config.max_answer, window=overlong_window(config))
    trained_on = torch.ones_like(table, dtype=torch.bool)
    if parts.drop_equal_groups:
        trained_on &= ~equal[:, None]
    if parts.overlong == "mask":
        trained_on &= ~is_truncated
    if parts.only_rewarded:
        trained_on &= table > 0
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
