"""All files of a run's folder, read and validated for a report.

This is also the one declaration of answers/step-N.jsonl: a model's answers to held-out tasks in reinforcement learning.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.accounting.pricing import mfu_of_steps
from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.json_files import malformed, read_if_present, read_json, refuse_unknown
from napkin.runs.accounting_files import Evaluation, MeasurementFile, Natural, PlanFile
from napkin.runs.metrics import METRICS_FILE, MetricsRecord, StepMetrics, read_metrics_record
from napkin.runs.run_folder import RunFolder

FOLDER = "answers"
VERDICT_FILE = "verdict.txt"
"""A sentence per line on a program that napkin watched."""
MOST_ANSWERS = 256
"""The most answers that are kept per evaluation."""
_NAME = re.compile(r"step-(\d{8,})\.jsonl")


@dataclass(frozen=True)
class Said:
    """A message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Answered:
    """A task and its answer: a line of the file."""

    messages: tuple[Said, ...]
    reward: float
    tokens: Natural
    """The number of tokens that the model sampled."""
    ending: str
    """done, cut (truncated at the longest completion), or no room in the context."""
    failure: str | None = None
    """The reason if the reward could not be computed."""


@dataclass(frozen=True)
class Answers:
    """The answers of one evaluation."""

    step: int
    answered: tuple[Answered, ...]


def write_answers(run: Path, step: int, answered: Iterable[Answered]) -> None:
    """Write the file of a step, replacing one of before."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    lines = (
        json.dumps({name: value for name, value in msgspec.to_builtins(each).items() if value is not None}) + "\n"
        for each in answered
    )
    atomic_write_text(folder / f"step-{step:08d}.jsonl", "".join(lines), overwrite=True)


def read_newest_answers(run: Path) -> Answers | None:
    """The answers of the last evaluation; None where there are none. Raises CorruptFile for a damaged file."""
    folder = run / FOLDER
    matches = [match for path in folder.glob("step-*.jsonl") if (match := _NAME.fullmatch(path.name))]
    if not matches:
        return None
    newest = max(matches, key=lambda match: int(match[1]))
    path, answered = folder / newest[0], list[Answered]()
    try:
        for line in (read_if_present(path) or b"").splitlines()[:MOST_ANSWERS]:
            values = msgspec.json.decode(line, type=dict[str, Any])
            refuse_unknown(values, Answered)
            answered.append(msgspec.convert(values, Answered))
    except (ValueError, RecursionError) as error:
        raise malformed(path, error) from None
    return Answers(int(newest[1]), tuple(answered))


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder. What is written during the run is None, or empty, until then."""

    name: str
    recipe: str
    plan: PlanFile | None
    metrics: tuple[StepMetrics, ...]
    measurement: MeasurementFile | None
    evaluation: Evaluation | None
    samples: str | None
    verdict: tuple[str, ...] = ()
    """What stood out in a program that napkin watched, in sentences; empty for other runs."""
    problems: tuple[str, ...] = ()
    """A sentence for each problem of metrics.jsonl: damaged, displaced and missing lines."""
    incomplete: str | None = None
    """A sentence if the last line is incomplete, as a kill or the moment may leave it."""
    recipe_was_changed: bool = False
    """True if recipe.toml is known to differ from the one that the run was created with."""
    left_out: int = 0
    """Number of lines of metrics.jsonl that were not parsed."""
    answers: Answers | None = None
    """Answers to held-out tasks, of the last evaluation of a run of reinforcement learning."""

    @property
    def mfu(self) -> float | None:
        """The MFU of all steps together: as measured where a process has made them all, else of the logged steps."""
        measured, steps = self.measurement, self.metrics[-1].step if self.metrics else 0
        if measured is not None and measured.mfu is not None and measured.steps >= steps:
            return measured.mfu
        return mfu_of_steps((logged.mfu, logged.step_seconds) for logged in self.metrics)


def read_run_record(run: Path, metrics: MetricsRecord | None = None) -> RunRecord:
    """Read the files of a run that exist; `metrics` is a part of its metrics.jsonl that stands for all of it.

    Raises NapkinError, naming the file, where `run` is not a run folder or a file is malformed. Of metrics.jsonl the
    intact lines are read, and `problems` names the others.
    """
    recipe = read_if_present(run / "recipe.toml")
    if recipe is None:
        raise NapkinError(
            f"'{run}' is not a run folder: it holds no recipe.toml; name a folder that `napkin train` has written"
        )
    try:
        text = recipe.decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(run / "recipe.toml", error) from error
    samples = read_if_present(run / "samples.txt")
    verdict = (read_if_present(run / VERDICT_FILE) or b"").decode("utf-8", errors="replace")
    metrics = metrics or read_metrics_record(run / METRICS_FILE)
    return RunRecord(
        name=run.resolve().name,
        recipe=text,
        plan=read_json(run / "plan.json", PlanFile),
        metrics=metrics.metrics,
        measurement=read_json(run / "measurement.json", MeasurementFile),
        evaluation=read_json(run / "evaluation.json", Evaluation),
        # A byte-level model may generate invalid UTF-8.
        samples=None if samples is None else samples.decode("utf-8", errors="replace"),
        verdict=tuple(verdict.splitlines()),
        problems=tuple(metrics.messages()),
        incomplete=None if metrics.incomplete is None else metrics.describe_incomplete(),
        recipe_was_changed=RunFolder(run).recipe_was_changed,
        left_out=metrics.left_out,
        answers=read_newest_answers(run),
    )
