"""metrics.jsonl: a line per logged step, appended as a run goes on; the one declaration of what a line holds."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import NapkinError
from napkin.files import atomic_write_text, sync_file

METRICS_FILE = "metrics.jsonl"


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


class MetricsFile:
    """Appends to a run's metrics.jsonl; a resumed run first drops what lies past its checkpoint."""

    def __init__(self, run: Path, *, writes: bool = True) -> None:
        # Rank 0 writes; for the other ranks there is no file.
        self.path = run / METRICS_FILE if writes else Path(os.devnull)

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
