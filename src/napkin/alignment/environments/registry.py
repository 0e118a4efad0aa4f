"""Environments by name."""

from collections.abc import Callable

from napkin.alignment.environments.arithmetic import Arithmetic
from napkin.alignment.environments.environment import Environment
from napkin.errors import NapkinError
from napkin.near_names import suggestion

ENVIRONMENTS: dict[str, tuple[Callable[..., Environment], int]] = {"arithmetic": (Arithmetic, 2)}
"""What makes each of a level and of a side of the split, and its default level."""
MOST_LEVEL = 64


def environment_named(name: str, *, reward: str = "math", held_out: bool = False) -> Environment:
    """An environment by name: one that is bundled, with a level after a colon if not its default.

    `held_out` asks for the tasks that are kept for evaluation: none of them is one for training. `reward` judges the
    answers to the prompts of a file. Raises NapkinError for a name that is not known.
    """
    kind, colon, level = name.partition(":")
    if kind not in ENVIRONMENTS:
        raise NapkinError(f"'{name}' is not an environment: {suggestion(kind, ENVIRONMENTS)}")
    make, default = ENVIRONMENTS[kind]
    if colon and not (level.isascii() and level.isdigit() and 1 <= int(level[:9]) <= MOST_LEVEL):
        raise NapkinError(f"the level of environment '{name}' is '{level}': use 1 to {MOST_LEVEL}, such as {kind}:3")
    return make(int(level) if colon else default, held_out)
