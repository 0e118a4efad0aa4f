"""Training tasks and held-out tasks: a hash of a task's content decides, so that no task is both."""

import random
from collections.abc import Callable
from hashlib import sha256

from napkin.alignment.environments.environment import Task
from napkin.errors import NapkinError

HELD_OUT = 8
"""One content in so many is held out."""
MOST_DRAWS = 1000
"""Draws until one is on the wanted side: with 1 in 8, the chance that none is (7/8)^1000, below 1e-57."""


def is_held_out(content: str) -> bool:
    """Whether tasks of this content are kept for evaluation."""
    return sha256(content.encode("utf-8", "surrogatepass")).digest()[0] % HELD_OUT == 0


def task_of_split(name: str, draw: Callable[[random.Random], Task], seed: int, *, held_out: bool) -> Task:
    """The task that `draw` makes of a seed on one side of the split: a pure function of name and seed.

    Raises NapkinError where none is on that side, because there are few tasks.
    """
    for attempt in range(MOST_DRAWS):
        # A text is hashed as it stands, which gives the same numbers on every machine.
        task = draw(random.Random(f"{name}/{seed}/{attempt}"))
        if is_held_out(task.split_key) == held_out:
            return task
    side = "held-out" if held_out else "training"
    raise NapkinError(f"environment '{name}' gave no {side} task in {MOST_DRAWS} draws: it needs more different tasks")
