"""Credit: rewards of answers become advantages of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from napkin.chats.token_sequence import TokenSequence, Unit
from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import ReinforcementConfig
from napkin.tuning.policy_gradient.algorithms import PolicyParts, parts_of

# FOLD tuning/policy_gradient/credit.py
# Advantages: how much better an answer's reward is than what was to be expected.
#
# A baseline that does not depend on the answer leaves the expected gradient as it is and lowers its variance
# (Williams 1992).

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


# FOLD tuning/policy_gradient/credit.py
# Answers that come near to the longest that is allowed, or are cut there.


def overlong_penalty(
    lengths: Int[Tensor, "group answer"], *, max_length: int, window: int
) -> Float[Tensor, "group answer"]:
    """What an answer's reward is changed by for its length: DAPO's soft punishment (Yu et al. 2025, equation 13).

    0 up to max_length - window tokens, then evenly down to -1 at max_length.
    """
    return -((lengths.double() - (max_length - window)) / window).clamp(0, 1)


@dataclass(frozen=True, eq=False)
class Credit:
    """What is learned from each answer of a batch."""

    advantages: Float[Tensor, "group answer"]
    """Of an answer's tokens, all alike; with gae the reward that its last token gets."""
    learned: Bool[Tensor, "group answer"]
    """Whether an answer is learned from; the others are left out of all counts."""
    rewards: Float[Tensor, "group answer"]
    """With the penalty for length, if there is one."""
    equal_groups: int
    """Groups whose answers all had the same reward, before a penalty."""


def advantages_of(
    config: ReinforcementConfig,
    rewards: ArrayLike,
    lengths: ArrayLike,
    cut: ArrayLike | None = None,
    *,
    prompts: Sequence[str] = (),
) -> Credit:
    """What is learned from answers with these rewards.

    All are of shape [group, answer], in float64: rewards; lengths in tokens; and whether an answer was cut at the
    longest length, by default if it is that long. `prompts` name the groups in errors. Raises NapkinError for a reward
    that is not a finite number.
    """
    parts = parts_of(config)
    given = torch.as_tensor(np.asarray(rewards, dtype=np.float64))
    sizes = torch.as_tensor(np.asarray(lengths, dtype=np.int64))
    was_cut = sizes >= config.max_answer if cut is None else torch.as_tensor(np.asarray(cut, dtype=bool))
    _check_finite(given, prompts)
    equal = has_equal_rewards(given)
    shaped = given
    if parts.overlong == "penalty":
        # A cut answer would have been longer still.
        reached = torch.where(was_cut, config.max_answer, sizes)
        shaped = given + overlong_penalty(reached, max_length=config.max_answer, window=overlong_window(config))
    learned = torch.ones_like(given, dtype=torch.bool)
    if parts.drop_equal_groups:
        learned &= ~equal[:, None]
    if parts.overlong == "mask":
        learned &= ~was_cut
    if parts.only_rewarded:
        learned &= given > 0
    return Credit(_advantages(parts, shaped), learned, shaped, int(equal.sum()))


def overlong_window(config: ReinforcementConfig) -> int:
    """Over how many tokens before the longest answer DAPO's penalty rises; by default a fifth, as in its section 4."""
    return min(config.overlong_window or max(config.max_answer // 5, 1), config.max_answer)


def learned_units(
    config: ReinforcementConfig, groups: Sequence[Sequence[TokenSequence]], credit: Credit
) -> list[list[Unit]]:
    """Each group's answers that are learned from, with "advantages" of their tokens; with gae, "returns" too.

    `groups[g][a]` is answer a to prompt g, of which the tokens of the answer count; with gae it has "old_values".
    Groups may be left empty.
    """
    parts = parts_of(config)
    return [
        [
            (_with_credit(parts, config, answer, float(credit.advantages[g, a])),)
            for a, answer in enumerate(group)
            if credit.learned[g, a]
        ]
        for g, group in enumerate(groups)
    ]


def _with_credit(
    parts: PolicyParts, config: ReinforcementConfig, answer: TokenSequence, advantage: float
) -> TokenSequence:
    if parts.advantage != "gae":
        return answer.with_values(advantages=np.full(answer.n_counted, advantage, np.float32))
    if "old_values" not in answer.values:
        raise NapkinError("an answer has no 'old_values', which rl.advantage gae reads: give those of the value head")
    values = torch.as_tensor(answer.values["old_values"], dtype=torch.float64)
    rewards = torch.zeros_like(values)
    rewards[-1:] = advantage
    advantages = generalised_advantages(rewards, values, decay=config.gae_lambda)
    return answer.with_values(
        advantages=advantages.numpy().astype(np.float32), returns=(advantages + values).numpy().astype(np.float32)
    )


def _advantages(parts: PolicyParts, rewards: Float[Tensor, "group answer"]) -> Float[Tensor, "group answer"]:
    if parts.only_rewarded:
        return torch.ones_like(rewards)
    match parts.advantage:
        case "group":
            return group_normalised(rewards)
        case "group mean":
            return less_group_mean(rewards)
        case "leave one out":
            return less_mean_of_others(rewards)
        case "batch":
            return less_batch_mean(rewards)
        case "none" | "gae":
            return rewards


def _check_finite(rewards: Float[Tensor, "group answer"], prompts: Sequence[str]) -> None:
    for group, answer in (~rewards.isfinite()).nonzero().tolist():
        name = f" '{prompts[group][:60]}'" if prompts else ""
        raise NapkinError(
            f"the reward of answer {answer + 1} to prompt {group + 1}{name} is {float(rewards[group, answer])}: "
            "let the reward be a finite number"
        )
