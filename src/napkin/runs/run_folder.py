"""The folder of a run: what was chosen, what was predicted, what was measured, and the checkpoints.

A run folder appears whole: it is prepared under a hidden name and renamed. One process at a time trains in it.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, atomic_write_text, sync_file, sync_folder, try_lock
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.recipe.recipe import Recipe, format_recipe, read_recipe


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path

    @classmethod
    def create(cls, path: StrPath, recipe: Recipe, tokenizer: Tokenizer) -> "RunFolder":
        """Make the folder with its recipe and tokenizer; a NapkinError where it exists."""
        path = Path(path)
        cls.refuse_existing(path)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            draft.mkdir(parents=True)
            (draft / "checkpoints").mkdir()
            atomic_write_text(draft / "recipe.toml", format_recipe(recipe))
            tokenizer.save(draft / "tokenizer.json")
            # Renaming a folder onto one that is not empty fails: a run that appeared meanwhile is not touched.
            draft.rename(path)
            sync_folder(path.parent)
        except OSError as error:
            raise NapkinError(f"'{path}' cannot be made ({error.strerror}): choose another --run") from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return cls(path)

    @staticmethod
    def refuse_existing(path: StrPath) -> None:
        """Raise NapkinError where a run, or anything else, is at `path`."""
        if Path(path).exists():
            raise NapkinError(
                f"'{path}' exists and is not overwritten: "
                f"continue it with `napkin resume {path}` or choose another --run"
            )

    @classmethod
    def open(cls, path: StrPath) -> "RunFolder":
        """The folder of a run that was started before."""
        path = Path(path)
        if not (path / "recipe.toml").is_file():
            raise NapkinError(f"'{path}' is not a run, it holds no recipe.toml: name a folder that `napkin train` made")
        return cls(path)

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return read_recipe(self.path / "recipe.toml")

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's own copy of its tokenizer."""
        return load_tokenizer(self.path / "tokenizer.json")

    @property
    def checkpoints(self) -> Path:
        """The folder that holds the checkpoints."""
        return self.path / "checkpoints"

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the run's JSON files, whole, in place of an earlier one."""
        text = json.dumps(msgspec.to_builtins(value), indent=2) + "\n"
        atomic_write_text(self.path / name, text, overwrite=True)

    def read_json(self, name: str) -> Any:
        """One of the run's JSON files, or None where it is not there yet."""
        path = self.path / name
        try:
            return msgspec.json.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise CorruptFile(f"'{path}' is not JSON ({error}): remove it") from None

    def remove_leftovers(self) -> None:
        """Remove what killed writers left beside the files that training alone writes; the lock must be held."""
        for name in ("plan.json", "metrics.jsonl", "measurement.json", "tracking.json"):
            for path in self.path.glob(f".{name}.*.tmp"):
                path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process; a NapkinError where another one trains in it."""
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _lock_soon(descriptor):
                raise NapkinError(
                    f"'{self.path}' is being trained by another process: wait for it, or stop it, and try again"
                )
            yield
        finally:
            os.close(descriptor)


def lower_learning_rate(run: Path, *, otherwise: str = "") -> str:
    """The way on for a run whose numbers have become infinite or NaN, with another way between its halves."""
    # `napkin resume` takes no options: what it goes on with stands in the run's own recipe.
    return (
        f"lower learning_rate in '{run / 'recipe.toml'}'{otherwise} and `napkin resume {run}`; "
        f"earlier checkpoints in '{run / 'checkpoints'}' are kept"
    )


def _lock_soon(descriptor: int) -> bool:
    """`try_lock`, tried again for a moment: whoever asks whether somebody trains holds it for an instant."""
    for pause in (0.05, 0.1, 0.2):
        if try_lock(descriptor):
            return True
        time.sleep(pause)
    return try_lock(descriptor)


@dataclass(frozen=True)
class StepMetrics:
    """A line of metrics.jsonl."""

    step: int
    """Updates done."""
    tokens: int
    """Tokens learned from."""
    loss: float
    """Nats per token, over the batch, before the update; NaN, and null in the file, where it was not finite."""
    learning_rate: float
    gradient_norm: float
    """Before clipping; as the loss."""
    seconds: float
    """Since the start of the run; time between a kill and a resume left out."""
    step_seconds: float
    tokens_per_second: float
    mfu: float
    """FLOPs of the count a second, over this machine's measured matmul peak."""
    bytes: int
    """Resident bytes of the process; on a GPU the largest number allocated there."""
    validation_loss: float | None = None
    spike: float | None = None
    """How far the loss lies over those before, in robust standard deviations, where that is far: see LossSpikes."""
    skipped: str | None = None
    """Why the update was not made, where it was not."""
    expert_tokens: list[list[int]] | None = None
    """Visits that each expert was asked for in the step, by layer; without experts, None."""
    dropped_tokens: list[int] | None = None
    """Visits that found their expert full, by layer."""

    @property
    def is_notable(self) -> bool:
        """Whether the line is logged whatever log_every says."""
        return self.validation_loss is not None or self.spike is not None or self.skipped is not None


class FollowedRun(RunFolder):
    """The folder of a run that another rank writes: reading alone does anything."""

    def write_json(self, name: str, value: Any) -> None:
        """Left to the first rank."""

    def remove_leftovers(self) -> None:
        """Left to the first rank."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The first rank holds the run for all."""
        yield


class MetricsFile:
    """metrics.jsonl: a line a logged step, appended; a resumed run first drops what lies past its checkpoint."""

    def __init__(self, run: RunFolder) -> None:
        # What another rank writes is nowhere for this one.
        self.path = Path(os.devnull) if isinstance(run, FollowedRun) else run.path / "metrics.jsonl"

    def rewind(self, step: int) -> None:
        """Keep the lines up to `step`; a line that a kill cut off goes too."""
        kept = "".join(format_metrics(metrics) for metrics in read_metrics(self.path) if metrics.step <= step)
        # A file that needs no change is not written: a run resumes on a full disk as far as it can.
        if not self.path.exists() or self.path.read_bytes() != kept.encode():
            atomic_write_text(self.path, kept, overwrite=True)

    def append(self, metrics: StepMetrics) -> None:
        """Add one line; a NapkinError where the disk is full."""
        line = format_metrics(metrics).encode()
        try:
            # One write a line: a kill cuts off at most the last one. A full disk may take a part of it.
            with open(self.path, "ab", buffering=0) as file:
                while line:
                    line = line[file.write(line) :]
        except OSError as error:
            raise NapkinError(
                f"'{self.path}' cannot be written ({error.strerror}) after step {metrics.step}: make room and continue "
                f"with `napkin resume {self.path.parent}`, earlier checkpoints are kept"
            ) from None

    def sync(self) -> None:
        """Return when all lines are on the disk."""
        if self.path.is_file():
            sync_file(self.path)


def read_metrics(path: Path) -> Iterator[StepMetrics]:
    """The lines of a metrics.jsonl that are whole, in order; none where there is no file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(msgspec.MsgspecError):
                yield parse_metrics(line)


def format_metrics(metrics: StepMetrics) -> str:
    """A line of metrics.jsonl."""
    values = {name: value for name, value in vars(metrics).items() if value is not None}
    if metrics.skipped is not None:
        # JSON has no infinity and no NaN.
        values |= {name: None for name in _NULLABLE if not math.isfinite(values[name])}
    return json.dumps(values) + "\n"


def parse_metrics(line: str | bytes) -> StepMetrics:
    """What `format_metrics` made a line of; raises msgspec.MsgspecError where it is none."""
    try:
        return msgspec.json.decode(line, type=StepMetrics)
    except msgspec.ValidationError:
        values = msgspec.json.decode(line, type=dict[str, Any])
        return msgspec.convert(
            values | {name: math.nan for name in _NULLABLE if values.get(name, 0) is None}, StepMetrics
        )


_NULLABLE = ("loss", "gradient_norm")
