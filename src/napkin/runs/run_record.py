"""All files of a run's folder, read and validated for a report.

Files other than the recipe are written during the run; they are None, or empty, until then.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from napkin.accounting.utilisation import mfu_of_steps
from napkin.errors import NapkinError
from napkin.files import read_bytes
from napkin.runs.evaluation_file import Evaluation
from napkin.runs.measurement_file import MeasurementFile
from napkin.runs.metrics import METRICS_FILE, StepMetrics, parse_metrics
from napkin.runs.plan_file import PlanFile

T = TypeVar("T")


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder."""

    name: str
    recipe: str
    plan: PlanFile | None
    metrics: tuple[StepMetrics, ...]
    measurement: MeasurementFile | None
    evaluation: Evaluation | None
    samples: str | None

    @property
    def mfu(self) -> float | None:
        """Of all steps together: as measured where a process has made them all, else of the logged steps."""
        measured, steps = self.measurement, self.metrics[-1].step if self.metrics else 0
        if measured is not None and measured.mfu is not None and measured.steps >= steps:
            return measured.mfu
        return mfu_of_steps((logged.mfu, logged.step_seconds) for logged in self.metrics)


def read_run_record(run: Path) -> RunRecord:
    """Read the files of a run that exist.

    Raises NapkinError, naming the file, where `run` is not a run folder or a file is malformed. Only the last line of
    metrics.jsonl may be incomplete: a killed run ends like that.
    """
    recipe = _read(run / "recipe.toml")
    if recipe is None:
        raise NapkinError(
            f"'{run}' is not a run folder: it holds no recipe.toml; name a folder that `napkin train` has written"
        )
    samples = _read(run / "samples.txt")
    return RunRecord(
        name=run.resolve().name,
        recipe=_text(run / "recipe.toml", recipe),
        plan=_read_json(run / "plan.json", PlanFile),
        metrics=_read_metrics(run / METRICS_FILE),
        measurement=_read_json(run / "measurement.json", MeasurementFile),
        evaluation=_read_json(run / "evaluation.json", Evaluation),
        # A byte-level model may generate invalid UTF-8.
        samples=None if samples is None else samples.decode("utf-8", errors="replace"),
    )


def _read(path: Path) -> bytes | None:
    try:
        return read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): make it a readable file") from error


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(path, error) from error


def _read_json(path: Path, kind: type[T]) -> T | None:
    data = _read(path)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except ValueError as error:
        raise _malformed(path, error) from error


def _read_metrics(path: Path) -> tuple[StepMetrics, ...]:
    lines = (_read(path) or b"").rstrip(b"\n").split(b"\n")
    if lines == [b""]:
        return ()
    steps: list[StepMetrics] = []
    for number, line in enumerate(lines, 1):
        try:
            logged = parse_metrics(line)
        except ValueError as error:
            # Valid JSON with wrong types was not cut off by a kill, even in the last line.
            if number == len(lines) and not isinstance(error, msgspec.ValidationError):
                break
            raise _malformed(path, error, f", line {number}") from error
        # A run that resumes from a checkpoint repeats some steps: the later lines are those of the model.
        while steps and steps[-1].step >= logged.step:
            steps.pop()
        steps.append(logged)
    return tuple(steps)


def _malformed(path: Path, error: ValueError, place: str = "") -> NapkinError:
    return NapkinError(
        f"'{path}'{place} is malformed ({error}): restore the file, or move it away to report without it"
    )
