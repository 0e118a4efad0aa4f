"""The protocol of an environment: two functions, of which neither keeps anything.

`start` gives the task of a seed, `step` says what becomes of an answer. What is to be remembered between turns is the
state, which goes in and out: several answers to one task begin with the same state, so it is not changed in place.

Training tasks and held-out tasks: a hash of a task's content decides, so that no task is both.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

from napkin.chats.chat_format import Message
from napkin.errors import NapkinError


@dataclass(frozen=True)
class Task:
    """What a model is asked."""

    messages: tuple[Message, ...]
    """Up to where the model answers; the last one is the user's."""
    state: Any = None
    """What `step` needs to know of the task."""
    content: str = ""
    """Tasks of one content are the same for the split into training and held-out tasks; empty is what the messages
    say."""

    @property
    def split_key(self) -> str:
        """What decides on which side of the split the task is."""
        return self.content or "\n".join(f"{each.role}: {each.content}" for each in self.messages)


@dataclass(frozen=True)
class Outcome:
    """What becomes of an answer."""

    reward: float
    """Of this turn; that of an episode is the sum over its turns."""
    done: bool = True
    message: str | None = None
    """What the user says next, where it is not done."""
    state: Any = None
    """The state of the next turn, where it is not done."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Figures to be shown beside the reward, by name."""
    failure: str | None = None
    """Why the answer could not be graded: the reward is 0."""


@runtime_checkable
class Environment(Protocol):
    """Where tasks come from."""

    def start(self, seed: int) -> Task:
        """The task of a seed, from 0: the same one whenever it is asked for."""
        ...

    def step(self, state: Any, answer: str) -> Outcome:
        """What becomes of an answer in a state, which stays as it is."""
        ...


class ParallelEnvironment(Environment, Protocol):
    """One whose `step` may be called from several threads, because it waits for other processes.

    Outcomes are the same and are taken in the same order as without; an environment that lacks these is asked by one
    thread, an answer at a time.
    """

    @property
    def n_parallel(self) -> int:
        """How many answers are judged at a time, while others may be drawn; 0 is as if it were not here."""
        ...

    @property
    def one_turn(self) -> bool:
        """Whether an answer ends its episode: its outcome is then waited for once nothing is left to draw."""
        ...


@runtime_checkable
class SolvedEnvironment(Environment, Protocol):
    """One that knows a right answer to each of its tasks."""

    def solution(self, state: Any) -> str:
        """A right answer in a state; of several turns the next one."""
        ...


def ask(text: str, state: Any = None, *, content: str = "") -> Task:
    """A task of one message."""
    return Task((Message("user", text),), state, content)


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
