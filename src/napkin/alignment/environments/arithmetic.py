"""Arithmetic: sums, differences and products of two whole numbers."""

import random
from dataclasses import dataclass

from napkin.alignment.environments.environment import Outcome, Task, ask
from napkin.alignment.environments.split import task_of_split

_OPERATORS = "+-*"


@dataclass(frozen=True)
class Arithmetic:
    """`12+34=`, whose answer is `46`: each operand has 1 to `level` digits, and each operator is as likely.

    >>> Arithmetic().start(0).messages[0].content
    '1-1='
    >>> Arithmetic().step("46", " 46\\n").reward, Arithmetic().step("46", "46 or 47").reward
    (1.0, 0.0)
    """

    level: int = 2
    held_out: bool = False
    operators: str = _OPERATORS

    def start(self, seed: int) -> Task:
        """The problem of a seed; the state is its result."""
        name = "arithmetic" if self.operators == _OPERATORS else f"arithmetic {self.operators}"
        return task_of_split(f"{name}:{self.level}", self._draw, seed, held_out=self.held_out)

    def step(self, state: str, answer: str) -> Outcome:
        """1 for the result and nothing else."""
        return Outcome(float(answer.strip() == state))

    def solution(self, state: str) -> str:
        """The result."""
        return state

    def _draw(self, draw: random.Random) -> Task:
        first, second = (draw.randrange(10 ** draw.randint(1, self.level)) for _ in range(2))
        operator = draw.choice(self.operators)
        result = first + second if operator == "+" else first - second if operator == "-" else first * second
        # 3+4 is the same task as 4+3: who has learned one knows the other.
        ordered = (first, second) if operator == "-" else (min(first, second), max(first, second))
        content = f"{ordered[0]}{operator}{ordered[1]}"
        return ask(f"{first}{operator}{second}=", str(result), content=content)
