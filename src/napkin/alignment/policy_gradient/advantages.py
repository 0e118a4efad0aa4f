"""Advantages: how much better an answer's reward is than what was to be expected.

A baseline that does not depend on the answer leaves the expected gradient as it is and lowers its variance
(Williams 1992).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from napkin.errors import NapkinError

EPSILON = 1e-4
"""Added to a group's standard deviation, so that rewards which are nearly equal are not blown up: where they differ by
1e-5, advantages stay below 0.1. The value is that of TRL's GRPOTrainer; the papers name none."""

Rewards = Float[Tensor, "group answer"]
"""Of some prompts' groups of answers."""


def group_normalised(rewards: Rewards, *, epsilon: float = EPSILON) -> Rewards:
    """(r - mean) / (std + epsilon) of each group, as in GRPO (Shao et al. 2024, section 4.1.2).

    The standard deviation is the sample's, with n - 1. Groups of equal rewards, and so of one answer, get 0.
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
    """r - mean of the other answers of the group: RLOO (Kool et al. 2019; Ahmadian et al. 2024).

    Unbiased. Raises NapkinError for groups of one, which have no others.
    """
    n = rewards.shape[1]
    if n == 1:
        raise NapkinError("a group of 1 answer has no others to compare it with: use groups of 2 or more")
    return less_group_mean(rewards) * (n / (n - 1))


def less_batch_mean(rewards: Rewards) -> Rewards:
    """r - mean of all answers of the batch, REINFORCE's baseline (Williams 1992)."""
    return rewards - rewards.mean()


def has_equal_rewards(rewards: Rewards) -> Bool[Tensor, " group"]:
    """Whether all answers of a group have the same reward: such a group teaches nothing beside its own mean."""
    return (rewards == rewards[:, :1]).all(dim=1)


def generalised_advantages(
    rewards: Float[Tensor, " token"], values: Float[Tensor, " token"], *, decay: float, discount: float = 1.0
) -> Float[Tensor, " token"]:
    """Advantages of one answer's tokens (Schulman et al. 2016, equation 16), in float64.

    A_t = sum_k (discount · decay)^k · (r_{t+k} + discount · V_{t+k+1} - V_{t+k}), where V is 0 after the last token.
    values[t] is what was expected before token t; A + V are the returns that it learns.
    """
    advantages, advantage, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + discount * value_after - value + discount * decay * advantage
        value_after = value
        advantages.append(advantage)
    return torch.tensor(advantages[::-1], dtype=torch.float64)
