"""Validation losses of a run: the lowest one, and whether the run is overfitted.

Long curves reduced for drawing: thinned without losing a spike, smoothed without lag.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from napkin.runs.metrics import StepMetrics

Curve = NDArray[np.float64]


def thin(curves: Sequence[Curve], limit: int) -> NDArray[np.int64]:
    """Choose at most `limit` points that are kept of all curves (each: [points]), by their index, in ascending order.

    The minimum and the maximum of each curve in each interval are kept, and so are the ends. An interval in which a
    curve has only NaN remains a gap of that curve.
    """
    points = len(curves[0])
    if points <= limit:
        return np.arange(points)
    edges = np.linspace(0, points, max(1, (limit - 2) // (2 * len(curves))) + 1).astype(int)
    starts, stops = edges[:-1, None], edges[1:, None]
    # Intervals differ in length by one: the shorter ones have their last point twice.
    within = np.minimum(starts + np.arange(np.max(stops - starts)), stops - 1)
    kept = [np.array([0, points - 1])]
    for curve in curves:
        missing = np.isnan(curve)
        lows, highs = np.where(missing, np.inf, curve), np.where(missing, -np.inf, curve)
        kept += [edges[:-1] + lows[within].argmin(1), edges[:-1] + highs[within].argmax(1)]
    return np.unique(np.concatenate(kept))


def smooth(y: Curve, width: int) -> Curve:
    """Average each point of y [points] with its neighbours, at most `width` points in all; NaN are left out.

    Near the start the window stays symmetric, so that a steep beginning is not averaged away; at the end it is cut off.
    """
    finite = ~np.isnan(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(y))
    reach = np.minimum(index, width // 2)
    start, stop = index - reach, np.minimum(index + reach + 1, len(y))
    number = counts[stop] - counts[start]
    return np.where(number > 0, (sums[stop] - sums[start]) / np.maximum(number, 1), np.nan)


def smoothing_width(points: int) -> int:
    """The number of logged steps that a mean loss is taken over: 1/25 of the run, rounded to an odd number."""
    return points // 25 // 2 * 2 + 1


LEAST_RISE = 0.01
"""A validation loss this fraction above the lowest one counts as risen; less is noise."""


class Evaluated(NamedTuple):
    """A validation loss, and the step after which it was measured."""

    step: int
    loss: float


class Overfitting(NamedTuple):
    """The course of an overfitted run: after its lowest validation loss, the training loss fell and the validation loss
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
    """The overfitting of a run at its last evaluation; None if there is none. Training losses are means of neighbouring
    steps, as in the charts."""
    evaluated = evaluations(metrics)
    best = lowest(evaluated)
    if best is None or evaluated[-1].loss - best.loss <= LEAST_RISE * abs(best.loss):
        return None
    training = smooth(np.array([logged.loss for logged in metrics]), smoothing_width(len(metrics)))
    at_step = dict(zip((logged.step for logged in metrics), training.tolist(), strict=True))
    then, now = at_step[best.step], at_step[evaluated[-1].step]
    return Overfitting(best, evaluated[-1], then, now) if now < then else None
