"""Prompts with answers from a JSONL file, judged by a reward.

A line is {"prompt": TEXT, "answer": TEXT}, or has "question" for the prompt or "messages" for a conversation whose last
message is the user's. What is right may be a text, a number, or anything else that JSON can write; HumanEval's rows
have "test" and "entry_point" in its place.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from napkin.chats.chat_format import Message
from napkin.data.permutation import KeyedPermutation
from napkin.environments.environment import HELD_OUT, Outcome, Task, is_held_out
from napkin.errors import NapkinError, first_line
from napkin.files import StrPath, regular
from napkin.grading.reward import Reward

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
    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a JSONL file of prompts") from None
    if len(data) > MOST_BYTES:
        raise NapkinError(f"'{path}' has more than {MOST_BYTES:,} bytes: divide it")
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
        raise NapkinError("it has no answer: give what is right as answer")
    return row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"])


def is_prompt_file(name: str) -> bool:
    """True for the name of a file of prompts."""
    return Path(name).suffix.lower() in (".jsonl", ".json")
