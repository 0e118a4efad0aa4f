"""The history of a run that is stored in each checkpoint, beside weights and optimizer state.

It finds loss spikes too: steps whose loss stands out from those before it.
"""

import math
import statistics
from pathlib import Path
from typing import Annotated

import msgspec

from napkin.errors import first_line
from napkin.json_files import LARGEST
from napkin.runs.metrics import parse_metrics, read_metrics_record

WINDOW = 64
"""Number of recent losses that a new one is compared with."""
FEWEST = 16
"""Fewest losses for a comparison."""
THRESHOLD = 6.0
"""Robust standard deviations above the median from which a loss is a spike: one in a billion for normal noise."""

_NORMAL = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""
_LEAST_DEVIATION = 0.005
"""A share of the median: where losses hardly scatter, one that is off by a percent is not a spike."""


def spike(loss: float, recent: list[float]) -> float | None:
    """How many robust standard deviations a loss is above the median of the recent ones; None if it is not a spike.

    Hampel's identifier (Davies & Gather 1993, "The identification of multiple outliers"): median and median absolute
    deviation, which a few spikes among `recent` do not move.
    """
    if len(recent) < FEWEST:
        return None
    median = statistics.median(recent)
    deviation = _NORMAL * statistics.median(abs(each - median) for each in recent)
    score = (loss - median) / max(deviation, _LEAST_DEVIATION * abs(median), 1e-12)
    return score if score > THRESHOLD else None


def remember(loss: float, recent: list[float]) -> None:
    recent.append(loss)
    del recent[:-WINDOW]


_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Loss = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]


class History(msgspec.Struct, forbid_unknown_fields=True):
    """The metrics of past steps that later steps depend on, and all validation losses."""

    validation_losses: list[tuple[_Natural, _Loss]] = msgspec.field(default_factory=list)
    """(step, nats per token) of every evaluation."""
    recent_losses: list[_Loss] = msgspec.field(default_factory=list)
    """Losses of the last steps, for the detection of spikes."""
    skipped: _Natural = 0
    """Steps whose update was skipped."""
    skipped_in_a_row: _Natural = 0
    """Consecutive skipped steps up to the last step."""
    last_logged: _Natural = 0
    """Step of the last line of metrics.jsonl; 0 also where an older napkin wrote the checkpoint."""
    tokens: _Natural = 0
    """Tokens trained on, where steps differ in their number: in fine-tuning."""
    updates: _Natural | None = None
    """Updates of the optimizer, where a step may make several or none: in reinforcement learning. None is one for each
    step that was not skipped."""
    unfinished: str | None = None
    """The line of metrics of the last step, if a signal interrupted the evaluation after it: the evaluation is repeated
    on resuming."""

    def add_loss(self, loss: float) -> float | None:
        """Record the loss of a step whose update was made. Returns the score of a spike, otherwise None: see
        `spike`."""
        self.skipped_in_a_row = 0
        score = spike(loss, self.recent_losses)
        remember(loss, self.recent_losses)
        return score

    def forget_finished(self, metrics: Path) -> None:
        """Clear `unfinished` if its line is in the metrics file: a resumed process has finished it then."""
        if self.unfinished is None:
            return
        step = parse_metrics(self.unfinished).step
        for line in read_metrics_record(metrics).metrics:
            if line.step == step:
                self.unfinished = None
                if line.validation_loss is not None:
                    self.add_validation(step, line.validation_loss)

    def add_validation(self, step: int, loss: float) -> None:
        """Record an evaluation; one that is repeated after a resume replaces the earlier one."""
        self.validation_losses = [kept for kept in self.validation_losses if kept[0] != step]
        self.validation_losses.append((step, loss))

    def refuse_impossible(self, step: int) -> None:
        """Raise ValueError for values that a run cannot have had after `step` steps."""
        for name, value in (
            ("skipped", self.skipped),
            ("skipped_in_a_row", self.skipped_in_a_row),
            ("last_logged", self.last_logged),
            ("validation_losses", max((step for step, _ in self.validation_losses), default=0)),
        ):
            if value > step:
                raise ValueError(f"history.{name} is of {value:,} steps, the checkpoint of {step:,}")
        if len(self.recent_losses) > WINDOW:
            raise ValueError(f"history.recent_losses has {len(self.recent_losses):,} losses, at most {WINDOW} are kept")
        if self.unfinished is not None:
            try:
                unfinished = parse_metrics(self.unfinished).step
            except (ValueError, RecursionError) as error:
                raise ValueError(f"history.unfinished is not a line of metrics ({first_line(error)})") from None
            if unfinished != step:
                raise ValueError(f"history.unfinished is of step {unfinished:,}, the checkpoint of {step:,}")

    def copy(self) -> "History":
        """A copy that shares nothing with this one."""
        return msgspec.convert(msgspec.to_builtins(self), History)


def best_step(losses: dict[int, float], steps: list[int]) -> int | None:
    """The step among `steps` with the lowest finite loss, the earliest of equals; None where no loss is known."""
    known = [step for step in sorted(steps) if math.isfinite(losses.get(step, math.nan))]
    return min(known, key=losses.__getitem__, default=None)
