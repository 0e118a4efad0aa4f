"""An environment of the user's: FILE.py:NAME, a class or object with `start` and `step`.

It is the user's program and runs in this process, as the user's other programs do. Which of its tasks are held out is
decided by their content, as everywhere. What it raises is an error of `start`, and a failure with reward 0 of `step`.
"""

import importlib.util
import math
import random
from pathlib import Path
from typing import Any

from napkin.alignment.environments.environment import Environment, Outcome, Task
from napkin.alignment.environments.split import task_of_split
from napkin.errors import NapkinError, first_line


def own_environment(name: str, *, held_out: bool = False) -> Environment:
    """The environment that FILE.py:NAME names. Raises NapkinError if there is none."""
    path, _, attribute = name.rpartition(":")
    made = getattr(_module(path), attribute, None)
    if made is None:
        raise NapkinError(f"'{path}' has no {attribute}: name what has `start` and `step`")
    if isinstance(made, type) or not hasattr(made, "start"):
        try:
            made = made()
        except Exception as error:
            raise NapkinError(f"{name} cannot be made ({type(error).__name__}: {first_line(error)})") from None
    if not callable(getattr(made, "start", None)) or not callable(getattr(made, "step", None)):
        raise NapkinError(f"{name} has no `start` and `step`: an environment has both")
    return (_OwnSolved if hasattr(made, "solution") else _Own)(name, made, held_out=held_out)


class _Own:
    def __init__(self, name: str, made: Any, *, held_out: bool) -> None:
        self._name, self._made, self._held_out = name, made, held_out
        self.n_parallel = int(getattr(made, "n_parallel", 0))
        self.one_turn = bool(getattr(made, "one_turn", False))

    def start(self, seed: int) -> Task:
        return task_of_split(self._name, self._draw, seed, held_out=self._held_out)

    def step(self, state: Any, answer: str) -> Outcome:
        try:
            outcome = self._made.step(state, answer)
            if not isinstance(outcome, Outcome):
                raise TypeError(f"step gave {type(outcome).__name__}, not an Outcome")
            if not math.isfinite(outcome.reward):
                raise ValueError(f"the reward is {outcome.reward}: a finite number is needed")
            if not outcome.done and outcome.message is None:
                raise ValueError("an episode that is not done needs a message")
        except Exception as error:
            return Outcome(0.0, failure=f"{type(error).__name__}: {first_line(error)}")
        return outcome

    def _draw(self, draw: random.Random) -> Task:
        try:
            task = self._made.start(draw.getrandbits(48))
        except Exception as error:
            raise NapkinError(f"{self._name}: start raised {type(error).__name__}: {first_line(error)}") from None
        if not isinstance(task, Task):
            raise NapkinError(f"{self._name}: start gave {type(task).__name__}, not a Task")
        return task


class _OwnSolved(_Own):
    def solution(self, state: Any) -> str:
        return self._made.solution(state)


def _module(path: str) -> Any:
    if not Path(path).is_file():
        raise NapkinError(f"'{path}' is not a file: name an environment as FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(f"napkin_user_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise NapkinError(f"'{path}' cannot be run ({type(error).__name__}: {first_line(error)}): correct it") from None
    return module
