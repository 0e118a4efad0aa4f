"""metrics.jsonl: one line per logged step, appended while a run trains. The one declaration of what a line holds."""

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
from napkin.files import atomic_write_text, read_bytes, regular, sync_file

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """A line of metrics.jsonl. NaN is a figure that was not finite or is not known: null in the file."""

    step: int
    """Updates done."""
    tokens: int
    """Tokens learned from."""
    loss: float
    """Nats per token, over the batch, before the update."""
    learning_rate: float
    gradient_norm: float
    """Before clipping."""
    seconds: float
    """Since the start of the run; time between a kill and a resume left out."""
    step_seconds: float
    tokens_per_second: float
    mfu: float
    """Model-FLOPs utilisation: counted FLOPs per second over this machine's measured matmul peak."""
    bytes: int
    """Resident bytes of the process; on a GPU the peak of its allocated bytes. 0 where it is not known."""
    validation_loss: float | None = None
    spike: float | None = None
    """How far the loss is above the recent ones, in robust standard deviations; None if it is not a spike: see
    `napkin.runs.spikes`."""
    skipped: str | None = None
    """Why the update was skipped; None if it was not."""
    expert_tokens: list[list[int]] | None = None
    """Tokens routed to each expert in the step, by layer; None without experts."""
    dropped_tokens: list[int] | None = None
    """Routed tokens that were dropped because their expert was full, by layer."""

    @property
    def is_notable(self) -> bool:
        """Whether the line is logged whatever log_every says."""
        return self.validation_loss is not None or self.spike is not None or self.skipped is not None


class MetricsFile:
    """Appends to a run's metrics.jsonl; a resumed run first drops the lines past its checkpoint."""

    def __init__(self, run: Path, *, writes: bool = True) -> None:
        # Rank 0 writes; for the other ranks there is no file.
        self.path = run / METRICS_FILE if writes else Path(os.devnull)

    def rewind(self, step: int) -> None:
        """Keep the lines up to `step`; a line that a kill cut off is dropped too."""
        kept = "".join(format_metrics(metrics) for metrics in read_metrics(self.path) if metrics.step <= step)
        # A file that needs no change is not written, so that a run can resume on a full disk.
        if not self.path.exists() or read_bytes(self.path) != kept.encode():
            atomic_write_text(self.path, kept, overwrite=True)

    def append(self, metrics: StepMetrics) -> None:
        """Append one line. Raises NapkinError where the disk is full."""
        line = format_metrics(metrics).encode()
        try:
            # One write per line: a kill cuts off at most the last line. A full disk may accept only a part of it.
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
    """The complete lines of a metrics.jsonl, in order; none where there is no file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=regular) as file:
        for line in file:
            with contextlib.suppress(msgspec.MsgspecError):
                yield parse_metrics(line)


def format_metrics(metrics: StepMetrics) -> str:
    """A line of metrics.jsonl."""
    # JSON has neither NaN nor infinity.
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in vars(metrics).items()
        if value is not None
    }
    return json.dumps(values) + "\n"


def parse_metrics(line: str | bytes) -> StepMetrics:
    """The inverse of `format_metrics`; also reads lines of older runs, which lack some figures.

    Raises msgspec.MsgspecError where the line is not an object of JSON, or a value has the wrong type.
    """
    try:
        return msgspec.json.decode(line, type=StepMetrics)
    except msgspec.ValidationError:
        values = msgspec.json.decode(line, type=dict[str, Any])
        known = {name: value for name, value in values.items() if value is not None}
        return msgspec.convert(_ABSENT | known, StepMetrics)


_ABSENT = {
    "loss": math.nan,
    "learning_rate": math.nan,
    "gradient_norm": math.nan,
    "step_seconds": math.nan,
    "tokens_per_second": math.nan,
    "mfu": math.nan,
    "bytes": 0,
}
