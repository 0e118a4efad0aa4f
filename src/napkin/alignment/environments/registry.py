"""Environments by name."""

from collections.abc import Callable
from functools import partial

from napkin.alignment.environments.arithmetic import Arithmetic
from napkin.alignment.environments.environment import Environment
from napkin.alignment.environments.maze import Maze
from napkin.alignment.environments.own_environment import own_environment
from napkin.alignment.environments.prompt_file import PromptFile, is_prompt_file
from napkin.alignment.environments.sequences import Copying, Sorting
from napkin.alignment.rewards.registry import reward_named
from napkin.errors import NapkinError
from napkin.near_names import suggestion

ENVIRONMENTS: dict[str, tuple[Callable[..., Environment], int]] = {
    "arithmetic": (Arithmetic, 2),
    "copying": (Copying, 8),
    "maze": (Maze, 2),
    "sorting": (Sorting, 5),
    "sums": (partial(Arithmetic, operators="+"), 2),
}
"""What makes each of a level and of a side of the split, and its default level."""
MOST_LEVEL = 64


def environment_named(name: str, *, reward: str = "math", held_out: bool = False) -> Environment:
    """An environment by name: one that is bundled, with a level after a colon if not its default; FILE.py:NAME of the
    user's; or a JSONL file of prompts, whose answers `reward` judges.

    `held_out` asks for the tasks that are kept for evaluation: none of them is one for training. Raises NapkinError for
    what is not known or cannot be read.
    """
    if is_prompt_file(name):
        return PromptFile(name, reward_named(reward), held_out=held_out)
    if ".py:" in name:
        return own_environment(name, held_out=held_out)
    kind, colon, level = name.partition(":")
    if kind not in ENVIRONMENTS:
        known = suggestion(kind, ENVIRONMENTS)
        raise NapkinError(f"'{name}' is not an environment: {known}, or name FILE.py:NAME or a JSONL file of prompts")
    make, default = ENVIRONMENTS[kind]
    if colon and not (level.isascii() and level.isdigit() and 1 <= int(level[:9]) <= MOST_LEVEL):
        raise NapkinError(f"the level of environment '{name}' is '{level}': use 1 to {MOST_LEVEL}, such as {kind}:3")
    return make(int(level) if colon else default, held_out)
