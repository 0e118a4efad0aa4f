"""Validation losses of a run: the lowest one, and whether the run is overfitted."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from napkin.report.curves import smooth, smoothing_width
from napkin.runs.metrics import StepMetrics

LEAST_RISE = 0.01
"""A validation loss this fraction above the lowest one counts as risen; less is noise."""


class Evaluated(NamedTuple):
    """A validation loss, and the step after which it was measured."""

    step: int
    loss: float


class Overfitting(NamedTuple):
    """How a run is overfitted: after its lowest validation loss, the training loss fell and the validation loss
    rose."""

    best: Evaluated
    last: Evaluated
    training_at_best: float
    training_at_last: float

    def __str__(self) -> str:
        return (
            f"the validation loss rose from its lowest, {self.best.loss:.4f} at step {self.best.step:,}, to "
            f"{self.last.loss:.4f} at step {self.last.step:,}, while the training loss fell from "
            f"{self.training_at_best:.4f} to {self.training_at_last:.4f}"
        )


def evaluations(metrics: Sequence[StepMetrics]) -> list[Evaluated]:
    """The validation losses that are known, in order."""
    return [
        Evaluated(logged.step, logged.validation_loss)
        for logged in metrics
        if logged.validation_loss is not None and math.isfinite(logged.validation_loss)
    ]


def lowest(found: list[Evaluated]) -> Evaluated | None:
    """The lowest of some validation losses, the earliest of equals."""
    return min(found, key=lambda each: each.loss, default=None)


def overfitting(metrics: Sequence[StepMetrics]) -> Overfitting | None:
    """How a run is overfitted at its last evaluation; None if it is not. Training losses are means of neighbouring
    steps, as in the charts."""
    found = evaluations(metrics)
    best = lowest(found)
    if best is None or found[-1].loss - best.loss <= LEAST_RISE * abs(best.loss):
        return None
    training = smooth(np.array([logged.loss for logged in metrics]), smoothing_width(len(metrics)))
    at_step = dict(zip((logged.step for logged in metrics), training.tolist(), strict=True))
    then, now = at_step[best.step], at_step[found[-1].step]
    return Overfitting(best, found[-1], then, now) if now < then else None
