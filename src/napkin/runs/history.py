"""What a run remembers of its steps beside weights and moments: kept in each checkpoint, taken up on resuming."""

import math
from pathlib import Path
from typing import Annotated

import msgspec

from napkin.runs.metrics import parse_metrics, read_metrics
from napkin.runs.spikes import remember, spike

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class History(msgspec.Struct, forbid_unknown_fields=True):
    """Metrics so far, as far as later steps depend on them or somebody will ask for them."""

    validation_losses: list[tuple[_Natural, float]] = msgspec.field(default_factory=list)
    """(updates done, nats per token) of every evaluation."""
    recent_losses: list[float] = msgspec.field(default_factory=list)
    """Of the last steps, from which a spike stands out."""
    skipped: _Natural = 0
    """Steps whose update was not made."""
    skipped_in_a_row: _Natural = 0
    """Those of them that came last."""
    unfinished: str | None = None
    """The line of metrics of the last step, where a signal came while it was evaluated: the evaluation is made up
    for on resuming."""

    def add_loss(self, loss: float) -> float | None:
        """Remember the loss of a step whose update was made; how far it stands out, if it does: see `spike`."""
        self.skipped_in_a_row = 0
        score = spike(loss, self.recent_losses)
        remember(loss, self.recent_losses)
        return score

    def forget_finished(self, metrics: Path) -> None:
        """Forget that a line was unfinished if it is in the file of metrics: then a resumed process has finished it."""
        if self.unfinished is None:
            return
        step = parse_metrics(self.unfinished).step
        for line in read_metrics(metrics):
            if line.step == step:
                self.unfinished = None
                if line.validation_loss is not None:
                    self.add_validation(step, line.validation_loss)

    def add_validation(self, step: int, loss: float) -> None:
        """Remember an evaluation; one made again after a resume replaces itself."""
        self.validation_losses = [kept for kept in self.validation_losses if kept[0] != step]
        self.validation_losses.append((step, loss))

    def copy(self) -> "History":
        """Another one, with the same in it."""
        return msgspec.convert(msgspec.to_builtins(self), History)


def best_step(losses: dict[int, float], steps: list[int]) -> int | None:
    """Which of `steps` has the lowest of the losses that are known; the earliest of equals, None where none is."""
    known = [step for step in sorted(steps) if math.isfinite(losses.get(step, math.nan))]
    return min(known, key=losses.__getitem__, default=None)
