"""Environments by name, and solved tasks as conversations, to train a model on before it is rewarded.

FILE.py:NAME is an environment of the user's: a class or object with `start` and `step`. It is the user's program and
runs in this process, as the user's other programs do. The content of its tasks decides which are held out, as
everywhere. An exception in `start` is an error; one in `step` is a failure with reward 0.
"""

import importlib.util
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from napkin.chats.chat_format import Message
from napkin.data.permutation import KeyedPermutation
from napkin.environments.environment import (
    HELD_OUT,
    Environment,
    Outcome,
    SolvedEnvironment,
    Task,
    is_held_out,
    task_of_split,
)
from napkin.environments.puzzles import Arithmetic, Copying, Maze, Sorting
from napkin.errors import NapkinError, first_line, suggestion
from napkin.files import StrPath, read_bounded
from napkin.grading.reward import Reward, reward_named


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
            if not outcome.done and not outcome.messages:
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


ENVIRONMENTS: dict[str, tuple[Callable[..., Environment], int]] = {
    "arithmetic": (Arithmetic, 2),
    "copying": (Copying, 8),
    "maze": (Maze, 2),
    "sorting": (Sorting, 5),
    "sums": (partial(Arithmetic, operators="+"), 2),
}
"""Factories by name, each called with a level and a side of the split, and its default level."""
MOST_LEVEL = 64


def environment_named(name: str, *, reward: str = "math", held_out: bool = False) -> Environment:
    """An environment by name: one that is bundled, with a level after a colon if not its default; FILE.py:NAME of the
    user's; or a JSONL file of prompts, whose answers `reward` judges.

    `held_out` gives the tasks that are kept for evaluation: none of them is a training task. Raises NapkinError for a
    name that is not known and a file that cannot be read.
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


MOST_TURNS = 1000


def environment_chats(environment: SolvedEnvironment, n: int, seed: int = 0) -> Iterator[str]:
    """`n` lines of JSONL, each the conversation of a task with right answers: those of seeds `seed` and following.

    >>> from napkin.environments import environment_named
    >>> next(environment_chats(environment_named("arithmetic"), 1))
    '{"messages": [{"role": "user", "content": "1-1="}, {"role": "assistant", "content": "0"}]}'

    Raises NapkinError for an environment that knows no answers.
    """
    if not hasattr(environment, "solution"):
        raise NapkinError("the environment has no `solution`: only one that knows a right answer writes conversations")
    for number in range(seed, seed + n):
        task = environment.start(number)
        messages = [{"role": each.role, "content": each.content} for each in task.messages]
        state = task.state
        for _ in range(MOST_TURNS):
            answer = environment.solution(state)
            messages.append({"role": "assistant", "content": answer})
            outcome = environment.step(state, answer)
            if not outcome.messages:
                break
            messages += [{"role": each.role, "content": each.content} for each in outcome.messages]
            state = outcome.state
        else:
            raise NapkinError(f"the task of seed {number} is not done after {MOST_TURNS} right answers: correct it")
        yield json.dumps({"messages": messages}, ensure_ascii=False)


# Prompts with answers from a JSONL file, judged by a reward. A line is {"prompt": TEXT, "answer": TEXT}, or has
# "question" for the prompt or "messages" for a conversation whose last message is the user's. What is right may be a
# text, a number, or anything else that JSON can write; HumanEval's rows have "test" and "entry_point" in its place.

MOST_BYTES = 2**30


class PromptFile:
    """The prompts of a file on one side of the split; each epoch of seeds gives all of them in another order.

    Raises NapkinError with file and line for what cannot be read, and for an answer that the reward cannot judge.
    """

    def __init__(self, path: StrPath, reward: Reward, *, held_out: bool = False) -> None:
        self.reward = reward
        tasks = [_task(path, number, line, reward) for number, line in enumerate(_lines(path), 1) if not line.isspace()]
        self._tasks = [task for task in tasks if is_held_out(task.split_key) == held_out]
        if not self._tasks:
            side = "held out" if held_out else "for training"
            raise NapkinError(
                f"'{path}' has {len(tasks)} prompts, none of them {side}: give more, 1 in {HELD_OUT} is held out"
            )

    def __len__(self) -> int:
        return len(self._tasks)

    one_turn = True

    @property
    def n_parallel(self) -> int:
        return self.reward.n_parallel

    def start(self, seed: int) -> Task:
        """Return the prompt of a seed; the state is its reference answer."""
        epoch, place = divmod(seed, len(self._tasks))
        return self._tasks[int(KeyedPermutation(len(self._tasks), key=epoch % 2**64)(np.array([place]))[0])]

    def step(self, state: str, answer: str) -> Outcome:
        judged = self.reward.judge(answer, state)
        return Outcome(judged.reward, failure=judged.failure)


def _lines(path: StrPath) -> list[str]:
    data = read_bounded(path, MOST_BYTES, what="a JSONL file of prompts")
    try:
        return data.decode("utf-8-sig").removesuffix("\n").split("\n") if data.strip() else []
    except UnicodeDecodeError as error:
        raise NapkinError(f"'{path}' is not UTF-8 at byte {error.start}: convert it") from None


def _task(path: StrPath, number: int, line: str, reward: Reward) -> Task:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NapkinError(f"'{path}' line {number} is not JSON ({first_line(error)}): correct it") from None
    if not isinstance(row, dict):
        raise NapkinError(f"'{path}' line {number} is not a JSON object: write one per line")
    try:
        messages, right = _messages(row), _right(row)
        reward.check_reference(right)
    except NapkinError as error:
        raise NapkinError(f"'{path}' line {number}: {error}") from None
    return Task(messages, right)


def _messages(row: dict[str, Any]) -> tuple[Message, ...]:
    if "messages" in row:
        said = row["messages"]
        messages = [
            Message(each["role"], each["content"])
            for each in (said if isinstance(said, list) else [])
            if isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        ]
        if not messages or len(messages) != len(said) or messages[-1].role != "user":
            raise NapkinError("messages are not a list of role and content that ends with the user's: correct it")
        return tuple(messages)
    prompt = row.get("prompt", row.get("question"))
    if not isinstance(prompt, str) or not prompt.strip():
        raise NapkinError("it has no prompt: give a text as prompt, question or messages")
    return (Message("user", prompt),)


def _right(row: dict[str, Any]) -> str:
    name, tests = row.get("entry_point"), row.get("test")
    if "answer" not in row and isinstance(tests, str) and isinstance(name, str) and name.isidentifier():
        # HumanEval's rows: tests that define check(candidate), and the name of the candidate.
        return f"from program import {name}\n{tests}\n\ncheck({name})\n"
    if "answer" not in row:
        raise NapkinError("it has no answer: give the right one as answer")
    return row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"])


def is_prompt_file(name: str) -> bool:
    """True for the name of a file of prompts."""
    return Path(name).suffix.lower() in (".jsonl", ".json")
