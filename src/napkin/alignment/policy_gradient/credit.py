"""Credit: rewards of answers become advantages of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from torch import Tensor

from napkin.alignment.policy_gradient.advantages import (
    generalised_advantages,
    group_normalised,
    has_equal_rewards,
    less_batch_mean,
    less_group_mean,
    less_mean_of_others,
)
from napkin.alignment.policy_gradient.algorithms import PolicyParts, parts_of
from napkin.alignment.policy_gradient.overlong import overlong_penalty
from napkin.alignment.token_sequence import TokenSequence, Unit
from napkin.errors import NapkinError
from napkin.recipe.reinforcement_config import ReinforcementConfig


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
