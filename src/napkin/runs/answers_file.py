"""answers/step-N.jsonl: how a model in reinforcement learning answers held-out tasks. The one declaration of it."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.files import atomic_write_text
from napkin.runs.json_file import malformed, read_if_present, refuse_unknown
from napkin.runs.plan_file import Natural

FOLDER = "answers"
MOST_ANSWERS = 256
"""That are kept of an evaluation."""
_NAME = re.compile(r"step-(\d{8,})\.jsonl")


@dataclass(frozen=True)
class Said:
    """A message."""

    role: str
    content: str


@dataclass(frozen=True)
class Answered:
    """A task and its answer: a line of the file."""

    messages: tuple[Said, ...]
    reward: float
    tokens: Natural
    """That the model drew."""
    ending: str
    """done, cut at the longest answer, or out of room in the context."""
    failure: str | None = None
    """Why the reward could not be had."""


@dataclass(frozen=True)
class Answers:
    """Those of one evaluation."""

    step: int
    answered: tuple[Answered, ...]


def write_answers(run: Path, step: int, answered: Iterable[Answered]) -> None:
    """Write the file of a step, replacing one of before."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({name: value for name, value in _values(each).items() if value is not None}) for each in answered
    ]
    atomic_write_text(folder / f"step-{step:08d}.jsonl", "".join(f"{line}\n" for line in lines), overwrite=True)


def read_newest_answers(run: Path) -> Answers | None:
    """The answers of the last evaluation; None where there are none. Raises CorruptFile for a damaged file."""
    folder = run / FOLDER
    found = [match for path in folder.glob("step-*.jsonl") if (match := _NAME.fullmatch(path.name))]
    if not found:
        return None
    newest = max(found, key=lambda match: int(match[1]))
    path = folder / newest[0]
    lines = (read_if_present(path) or b"").splitlines()[:MOST_ANSWERS]
    try:
        return Answers(int(newest[1]), tuple(_answered(line) for line in lines))
    except (ValueError, RecursionError) as error:
        raise malformed(path, error) from None


def _values(answered: Answered) -> dict[str, Any]:
    return msgspec.to_builtins(answered)


def _answered(line: bytes) -> Answered:
    values = msgspec.json.decode(line, type=dict[str, Any])
    refuse_unknown(values, Answered)
    return msgspec.convert(values, Answered)
