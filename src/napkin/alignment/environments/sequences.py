"""Sorting and copying: tasks whose difficulty is their length."""

import random
from dataclasses import dataclass

from napkin.alignment.environments.environment import Outcome, Task, ask
from napkin.alignment.environments.split import task_of_split

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Sorting:
    """`Sort: 52 7 31`, whose answer is `7 31 52`: 2 to `level` numbers below 100.

    >>> Sorting().step("7 31 52", "7  31 52").reward, Sorting().step("7 31 52", "7 31").reward
    (1.0, 0.0)
    """

    level: int = 5
    held_out: bool = False

    def start(self, seed: int) -> Task:
        """The numbers of a seed; the state is their order."""
        return task_of_split(f"sorting:{self.level}", self._draw, seed, held_out=self.held_out)

    def step(self, state: str, answer: str) -> Outcome:
        """1 for all numbers in order."""
        return Outcome(float(answer.split() == state.split()))

    def solution(self, state: str) -> str:
        """The numbers in order."""
        return state

    def _draw(self, draw: random.Random) -> Task:
        numbers = [draw.randrange(100) for _ in range(draw.randint(2, max(2, self.level)))]
        solved = " ".join(map(str, sorted(numbers)))
        # Two orders of the same numbers have one answer.
        return ask("Sort: " + " ".join(map(str, numbers)), solved, content=solved)


@dataclass(frozen=True)
class Copying:
    """`Copy: qxv`, whose answer is `qxv`: 2 to `level` letters.

    >>> Copying().step("qxv", "qxv").reward, Copying().step("qxv", "qvx").reward
    (1.0, 0.0)
    """

    level: int = 8
    held_out: bool = False

    def start(self, seed: int) -> Task:
        """The letters of a seed, which are the state."""
        return task_of_split(f"copying:{self.level}", self._draw, seed, held_out=self.held_out)

    def step(self, state: str, answer: str) -> Outcome:
        """1 for the same letters."""
        return Outcome(float(answer.strip() == state))

    def solution(self, state: str) -> str:
        """The letters."""
        return state

    def _draw(self, draw: random.Random) -> Task:
        letters = "".join(draw.choice(_LETTERS) for _ in range(draw.randint(2, max(2, self.level))))
        return ask(f"Copy: {letters}", letters)
