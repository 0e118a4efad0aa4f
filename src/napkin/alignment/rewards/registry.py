"""Rewards by name."""

from collections.abc import Callable

from napkin.alignment.rewards.reward import Reward
from napkin.errors import NapkinError
from napkin.grading.choice import check_choice_reference, choice_score
from napkin.grading.exact import exact_score
from napkin.grading.mathematics.math_answer import (
    check_math_reference,
    check_number_reference,
    math_score,
    number_score,
)
from napkin.grading.pattern import check_regex_reference, regex_score
from napkin.grading.sandbox.own_function import OwnFunction
from napkin.grading.sandbox.program_tests import ProgramTests, check_program_reference
from napkin.hardware.host import usable_cores
from napkin.near_names import suggestion

_MOST_PARALLEL = 64
"""Programs at a time: each takes two processes and four descriptors."""

REWARDS: dict[str, Callable[[], Reward]] = {
    "exact": lambda: Reward("exact", exact_score),
    "number": lambda: Reward("number", number_score, check_number_reference),
    "math": lambda: Reward("math", math_score, check_math_reference),
    "choice": lambda: Reward("choice", choice_score, check_choice_reference),
    "regex": lambda: Reward("regex", regex_score, check_regex_reference),
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
