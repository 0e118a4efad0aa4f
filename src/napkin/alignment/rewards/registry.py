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
from napkin.alignment.rewards.sandbox.own_function import OwnFunction
from napkin.alignment.rewards.sandbox.program_tests import ProgramTests, check_program_reference
from napkin.errors import NapkinError
from napkin.hardware.host import usable_cores
from napkin.near_names import suggestion

_MOST_PARALLEL = 64
"""Programs at a time: each takes two processes and four descriptors."""

REWARDS: dict[str, Callable[[], Reward]] = {
    "exact": lambda: Reward("exact", exact_reward),
    "number": lambda: Reward("number", number_reward, check_number_reference),
    "math": lambda: Reward("math", math_reward, check_math_reference),
    "choice": lambda: Reward("choice", choice_reward, check_choice_reference),
    "regex": lambda: Reward("regex", regex_reward, check_regex_reference),
    "code": lambda: Reward(
        "code", ProgramTests(), check_program_reference, n_parallel=min(usable_cores(), _MOST_PARALLEL)
    ),
}
"""What makes each; a new reward counts its own failures."""


def reward_named(name: str) -> Reward:
    """A reward by its name, or FILE.py:NAME of a function of the user's.

    Raises NapkinError for a name that is not known, and for a file that is not there, cannot be loaded or
    does not have the function.
    """
    if ".py:" in name:
        path, _, function = name.rpartition(":")
        own = OwnFunction(path, function)
        # A misspelled name would otherwise be a whole run of rewards of 0.
        own.load()
        return Reward(name, own, n_parallel=1)
    if name not in REWARDS:
        raise NapkinError(f"'{name}' is not a reward: {suggestion(name, REWARDS)}, or name FILE.py:NAME")
    return REWARDS[name]()
