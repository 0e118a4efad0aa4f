"""What a run left in its folder, read and checked; nothing else is looked at.

Every file but the recipe comes as the run goes on and is None, or empty, until then.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from napkin.accounting.utilisation import mfu_of_steps
from napkin.errors import NapkinError
from napkin.runs.measurement_file import MeasurementFile
from napkin.runs.plan_file import NonNegative, PlanFile

T = TypeVar("T")


class LoggedStep(msgspec.Struct, frozen=True):
    """A line of metrics.jsonl; None stands for a figure that was not finite, or was not taken."""

    step: int
    tokens: int
    seconds: float
    """Since the start of the run."""
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    bytes: float | None = None
    validation_loss: float | None = None
    expert_tokens: list[list[int]] | None = None
    """Visits of each expert in the step, by layer; None where there are no experts."""
    dropped_tokens: list[int] | None = None
    """Visits that found their expert full, by layer."""


@dataclass(frozen=True)
class Evaluated:
    """evaluation.json: the model, and two compressors, on text that was held out."""

    loss: float
    perplexity: float
    bits_per_byte: NonNegative
    tokens: int
    bytes: int
    gzip_bits_per_byte: NonNegative
    xz_bits_per_byte: NonNegative
    step: int


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells of it."""

    name: str
    recipe: str
    plan: PlanFile | None
    metrics: tuple[LoggedStep, ...]
    measurement: MeasurementFile | None
    evaluation: Evaluated | None
    samples: str | None

    @property
    def mfu(self) -> float | None:
        """Of all steps together: as measured where a process has made them all, else of the logged steps."""
        measured, steps = self.measurement, self.metrics[-1].step if self.metrics else 0
        if measured is not None and measured.mfu is not None and measured.steps >= steps:
            return measured.mfu
        return mfu_of_steps((logged.mfu, logged.step_seconds) for logged in self.metrics)


def read_run_record(run: Path) -> RunRecord:
    """Read all that is there of a run.

    Raises NapkinError, naming the file, where `run` is no run folder or a file is not what it should be. Only the
    last line of metrics.jsonl may be broken off: that is how a killed run ends.
    """
    recipe = _read(run / "recipe.toml")
    if recipe is None:
        raise NapkinError(
            f"'{run}' is not a run folder: it holds no recipe.toml; name a folder that `train` has written"
        )
    samples = _read(run / "samples.txt")
    return RunRecord(
        name=run.resolve().name,
        recipe=_text(run / "recipe.toml", recipe),
        plan=_read_json(run / "plan.json", PlanFile),
        metrics=_read_metrics(run / "metrics.jsonl"),
        measurement=_read_json(run / "measurement.json", MeasurementFile),
        evaluation=_read_json(run / "evaluation.json", Evaluated),
        # A model of bytes may well write what is no UTF-8; that is its sample.
        samples=None if samples is None else samples.decode("utf-8", errors="replace"),
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): a file that you may read is needed") from error


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


def _read_metrics(path: Path) -> tuple[LoggedStep, ...]:
    lines = (_read(path) or b"").rstrip(b"\n").split(b"\n")
    if lines == [b""]:
        return ()
    decoder = msgspec.json.Decoder(LoggedStep)
    steps: list[LoggedStep] = []
    for number, line in enumerate(lines, 1):
        try:
            logged = decoder.decode(line)
        except ValueError as error:
            # A whole object of the wrong kind was not broken off, wherever it stands.
            if number == len(lines) and not isinstance(error, msgspec.ValidationError):
                break
            raise _malformed(path, error, f", line {number}") from error
        # A run that resumes from a checkpoint takes some steps again: the later lines are what the model went through.
        while steps and steps[-1].step >= logged.step:
            steps.pop()
        steps.append(logged)
    return tuple(steps)


def _malformed(path: Path, error: ValueError, place: str = "") -> NapkinError:
    return NapkinError(
        f"'{path}'{place} is malformed ({error}): restore the file, or move it away to report without it"
    )
