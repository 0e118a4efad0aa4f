"""Rewards by name."""

from collections.abc import Callable

from napkin.alignment.rewards.choice import check_choice_reference, choice_reward
from napkin.alignment.rewards.exact import exact_reward
from napkin.alignment.rewards.mathematics.math_answer import (
    check_math_reference,
    check_number_reference,
    math_reward,
    number_reward,
)
from napkin.alignment.rewards.pattern import check_regex_reference, regex_reward
from napkin.alignment.rewards.reward import Reward
from napkin.errors import NapkinError
from napkin.near_names import suggestion

REWARDS: dict[str, Callable[[], Reward]] = {
    "exact": lambda: Reward("exact", exact_reward),
    "number": lambda: Reward("number", number_reward, check_number_reference),
    "math": lambda: Reward("math", math_reward, check_math_reference),
    "choice": lambda: Reward("choice", choice_reward, check_choice_reference),
    "regex": lambda: Reward("regex", regex_reward, check_regex_reference),
}
"""What makes each; a new reward counts its own failures."""


def reward_named(name: str) -> Reward:
    """A reward by its name. Raises NapkinError for a name that is not known."""
    if name not in REWARDS:
        raise NapkinError(f"'{name}' is not a reward: {suggestion(name, REWARDS)}")
    return REWARDS[name]()
