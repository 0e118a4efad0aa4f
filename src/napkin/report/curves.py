"""Long curves reduced for drawing: thinned without losing a spike, smoothed without lag."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
    kept = {0, points - 1}
    for curve in curves:
        missing = np.isnan(curve)
        lows, highs = np.where(missing, np.inf, curve), np.where(missing, -np.inf, curve)
        for start, stop in itertools.pairwise(edges):
            kept.add(int(start + np.argmin(lows[start:stop])))
            kept.add(int(start + np.argmax(highs[start:stop])))
    return np.array(sorted(kept))


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
