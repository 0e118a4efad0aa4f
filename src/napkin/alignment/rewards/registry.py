"""Rewards by name."""

from collections.abc import Callable

from napkin.alignment.rewards.exact import exact_reward
from napkin.alignment.rewards.reward import Reward
from napkin.errors import NapkinError
from napkin.near_names import suggestion

REWARDS: dict[str, Callable[[], Reward]] = {
    "exact": lambda: Reward("exact", exact_reward),
}
"""What makes each; a new reward counts its own failures."""


def reward_named(name: str) -> Reward:
    """A reward by its name. Raises NapkinError for a name that is not known."""
    if name not in REWARDS:
        raise NapkinError(f"'{name}' is not a reward: {suggestion(name, REWARDS)}")
    return REWARDS[name]()
