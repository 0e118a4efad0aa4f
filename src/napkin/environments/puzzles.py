"""Bundled puzzles: arithmetic with two whole numbers; sorting and copying, whose difficulty is their length; and a
maze, which takes several turns of one step each.
"""

import random
from collections import deque
from dataclasses import dataclass, replace

from napkin.environments.environment import Outcome, Task, ask, task_of_split

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
        name = "arithmetic" if self.operators == _OPERATORS else f"arithmetic {self.operators}"
        return task_of_split(f"{name}:{self.level}", self._draw, seed, held_out=self.held_out)

    def step(self, state: str, answer: str) -> Outcome:
        return Outcome(float(answer.strip() == state))

    def solution(self, state: str) -> str:
        return state

    def _draw(self, draw: random.Random) -> Task:
        first, second = (draw.randrange(10 ** draw.randint(1, self.level)) for _ in range(2))
        operator = draw.choice(self.operators)
        result = first + second if operator == "+" else first - second if operator == "-" else first * second
        # 3+4 is the same task as 4+3: who has learned one knows the other.
        ordered = (first, second) if operator == "-" else (min(first, second), max(first, second))
        content = f"{ordered[0]}{operator}{ordered[1]}"
        return ask(f"{first}{operator}{second}=", str(result), content=content)


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
        return task_of_split(f"sorting:{self.level}", self._draw, seed, held_out=self.held_out)

    def step(self, state: str, answer: str) -> Outcome:
        return Outcome(float(answer.split() == state.split()))

    def solution(self, state: str) -> str:
        return state

    def _draw(self, draw: random.Random) -> Task:
        numbers = [draw.randrange(100) for _ in range(draw.randint(2, max(2, self.level)))]
        solved = " ".join(map(str, sorted(numbers)))
        # Different orders of the same numbers have the same answer.
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
        return task_of_split(f"copying:{self.level}", self._draw, seed, held_out=self.held_out)

    def step(self, state: str, answer: str) -> Outcome:
        return Outcome(float(answer.strip() == state))

    def solution(self, state: str) -> str:
        return state

    def _draw(self, draw: random.Random) -> Task:
        letters = "".join(draw.choice(_LETTERS) for _ in range(draw.randint(2, max(2, self.level))))
        return ask(f"Copy: {letters}", letters)


Place = tuple[int, int]
"""Row and column."""
STEPS: dict[str, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_WALLS = 0.3
"""The share of squares that are walls."""


@dataclass(frozen=True)
class MazeState:
    """The player's position, and the steps left."""

    free: frozenset[Place]
    side: int
    place: Place
    goal: Place
    steps_left: int

    def picture(self) -> str:
        """A line per row: `@` the player, `G` the goal, `.` free, `#` a wall."""
        signs = {self.goal: "G", self.place: "@"}
        return "\n".join(
            "".join(signs.get((row, column), "." if (row, column) in self.free else "#") for column in range(self.side))
            for row in range(self.side)
        )


@dataclass(frozen=True)
class Maze:
    """A square of `level` + 2 rows: the answer of a turn is `up`, `down`, `left` or `right`.

    The reward is 1 on reaching the goal. Twice the length of the shortest path plus two steps are allowed; a step into
    a wall, or an answer that is not a step, uses one up.
    """

    level: int = 2
    held_out: bool = False

    def start(self, seed: int) -> Task:
        return task_of_split(f"maze:{self.level}", self._draw, seed, held_out=self.held_out)

    def step(self, state: MazeState, answer: str) -> Outcome:
        """Take one step; the message is the new picture."""
        moved = STEPS.get(answer.strip().lower(), (0, 0))
        place = (state.place[0] + moved[0], state.place[1] + moved[1])
        after = replace(state, place=place if place in state.free else state.place, steps_left=state.steps_left - 1)
        if after.place == state.goal:
            return Outcome(1.0)
        if after.steps_left == 0:
            return Outcome(0.0)
        return Outcome(0.0, done=False, message=after.picture(), state=after)

    def solution(self, state: MazeState) -> str:
        """The next step of a shortest way; the first of several in the order of `STEPS`."""
        distances = _distances(state.free, state.goal)
        return next(
            name
            for name, (down, right) in STEPS.items()
            if distances.get((state.place[0] + down, state.place[1] + right), len(state.free)) < distances[state.place]
        )

    def _draw(self, draw: random.Random) -> Task:
        side = self.level + 2
        places = [(row, column) for row in range(side) for column in range(side)]
        while True:
            free = frozenset(place for place in places if draw.random() >= _WALLS)
            if len(free) < 2:
                continue
            place, goal = draw.sample(sorted(free), 2)
            distance = _distances(free, goal).get(place)
            if distance is not None:
                break
        state = MazeState(free, side, place, goal, 2 * distance + 2)
        return ask(f"up, down, left or right?\n{state.picture()}", state, content=state.picture())


def _distances(free: frozenset[Place], goal: Place) -> dict[Place, int]:
    """Steps to the goal from each place that leads there."""
    distances, coming = {goal: 0}, deque([goal])
    while coming:
        row, column = coming.popleft()
        for down, right in STEPS.values():
            near = (row + down, column + right)
            if near in free and near not in distances:
                distances[near] = distances[row, column] + 1
                coming.append(near)
    return distances
