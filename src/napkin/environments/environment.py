"""The protocol of an environment: two functions that keep no state.

`start` gives the task of a seed, `step` judges an answer. Everything remembered between turns is in the state, which is
passed in and returned: several answers to one task begin with the same state, so it must not be changed in place.

A hash of a task's content decides whether it is for training or held out, so that no task is both.
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
    """A question for the model, over one or several turns."""

    messages: tuple[Message, ...]
    """The conversation before the model's turn; the last message is the user's."""
    state: Any = None
    """Whatever `step` needs to know about the task."""
    content: str = ""
    """Tasks with equal content are on the same side of the split into training and held-out tasks; empty means the text
    of the messages."""

    @property
    def split_key(self) -> str:
        return self.content or "\n".join(f"{each.role}: {each.content}" for each in self.messages)


@dataclass(frozen=True)
class Outcome:
    """The environment's reaction to an answer."""

    reward: float
    """The reward of this turn; an episode's is the sum over its turns."""
    done: bool = True
    message: str | tuple[Message, ...] | None = None
    """The next turn, if the episode continues: a text for a turn of the user, messages for others, such as outputs of
    tools."""
    state: Any = None
    """The state of the next turn, if the episode continues."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further metrics to show with the reward, by name."""
    failure: str | None = None
    """Why the answer could not be graded; the reward is then 0."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the next turn; none if there is none."""
        if self.done or self.message is None:
            return ()
        return (Message("user", self.message),) if isinstance(self.message, str) else self.message


@runtime_checkable
class Environment(Protocol):
    """A source of tasks, which judges the answers to them."""

    def start(self, seed: int) -> Task:
        """Return the task of a seed, from 0 on; the same task for the same seed."""
        ...

    def step(self, state: Any, answer: str) -> Outcome:
        """Judge an answer in a state, which stays unchanged."""
        ...


class ParallelEnvironment(Environment, Protocol):
    """An environment whose `step` may be called from several threads, because it waits for other processes.

    Outcomes are the same, and in the same order, as with one thread; an environment without these properties is called
    by one thread, one answer at a time.
    """

    @property
    def n_parallel(self) -> int:
        """Answers that are judged at the same time, while others may be sampled; 0 is as if this property were
        absent."""
        ...

    @property
    def one_turn(self) -> bool:
        """True if an answer ends its episode: outcomes are then collected when no completion is running any more."""
        ...


@runtime_checkable
class SolvedEnvironment(Environment, Protocol):
    """An environment that knows a right answer to each of its tasks."""

    def solution(self, state: Any) -> str:
        """A right answer in a state; of several turns the next one."""
        ...


def ask(text: str, state: Any = None, *, content: str = "") -> Task:
    """A task of one message."""
    return Task((Message("user", text),), state, content)


HELD_OUT = 8
"""One content in this many is held out."""
MOST_DRAWS = 1000
"""Draws until one is on the wanted side: with 1 in 8, the chance that none is (7/8)^1000, below 1e-57."""


def is_held_out(content: str) -> bool:
    """True for contents that are kept for evaluation."""
    return sha256(content.encode("utf-8", "surrogatepass")).digest()[0] % HELD_OUT == 0


def task_of_split(name: str, draw: Callable[[random.Random], Task], seed: int, *, held_out: bool) -> Task:
    """The task that `draw` makes of a seed on one side of the split: a pure function of name and seed.

    Raises NapkinError where none is on that side, because there are few tasks.
    """
    for attempt in range(MOST_DRAWS):
        # A text is hashed unchanged, which gives the same split on every machine.
        task = draw(random.Random(f"{name}/{seed}/{attempt}"))
        if is_held_out(task.split_key) == held_out:
            return task
    side = "held-out" if held_out else "training"
    raise NapkinError(f"environment '{name}' gave no {side} task in {MOST_DRAWS} draws: it needs more different tasks")
