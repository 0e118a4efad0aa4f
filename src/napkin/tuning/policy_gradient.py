"""Policy gradients on one page: a model is trained on rewards of its own completions.

Each token of a completion with reward r, advantage A and probability π adds a term to the loss:

    A     = r - what was to be expected, of the group, the batch or a value head      advantage
    ρ     = π / π_old, of the token or the geometric mean over the completion         ratio
    term  = -min(ρ A, clip(ρ, 1 - low, 1 + high) A)                                   clip
    loss  = Σ term / N, N of tokens, sequences or a constant                          normalisation
          + kl_weight · KL(π ‖ reference) - entropy_weight · entropy                  divergence

`PRESETS` says which algorithm takes which of these parts. The functions are on tensors alone; `policy_loss.py`
applies them to batches, `objective.py` normalises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import PolicyAlgorithm
from napkin.tuning.objective import Normalisation

Tokens = Float[Tensor, " token"]
Limited = Bool[Tensor, " token"]
"""True at tokens where a limit acts."""
Rewards = Float[Tensor, "group completion"]
"""Rewards of completions, a group for each prompt."""


@dataclass(frozen=True)
class PolicyParts:
    """The parts of an algorithm; see `ReinforcementConfig` for what each means."""

    advantage: Literal["group", "group mean", "leave one out", "batch", "none", "gae"]
    ratio: Literal["token", "sequence", "none"]
    clip: Literal["ppo", "cispo", "none"]
    normalisation: Normalisation
    clip_low: float = 0.2
    clip_high: float = 0.2
    drop_equal_groups: bool = False
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
    # Yu et al. 2025, sections 3.1 to 3.4 and 4.1.
    "dapo": PolicyParts("group", "token", "ppo", "token", 0.2, 0.28, drop_equal_groups=True, overlong="penalty"),
    # MiniMax 2025, equations 4 and 5: no lower bound. The upper one, a ratio of 5, is of Khatri et al. 2025 (ScaleRL).
    "cispo": PolicyParts("group", "token", "cispo", "token", 1.0, 4.0),
    # Zheng et al. 2025, equations 5 to 7 and section 5.1.
    "gspo": PolicyParts("group", "sequence", "ppo", "sequence", 3e-4, 4e-4),
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


def truncated_sampler_ratios(
    old_log_probabilities: Tokens, sampler_log_probabilities: Tokens, limit: float
) -> Float[Tensor, " token"]:
    """min(pi_old / pi_sampler, limit): a weight that corrects for a sampler whose arithmetic is not the trainer's
    (truncated importance sampling: Ionides 2008; Yao et al. 2025). Without gradient."""
    return (old_log_probabilities - sampler_log_probabilities).exp().clamp(max=limit).detach()


# What limits a step away from the policy that answered. Each function returns the terms, and at which tokens the limit
# acts.


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
