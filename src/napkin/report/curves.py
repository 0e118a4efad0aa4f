"""Long curves reduced for drawing: thinned without losing a spike, smoothed without lag."""

import itertools

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]


def thin(x: Curve, y: Curve, limit: int) -> tuple[Curve, Curve]:
    """Choose at most `limit` points of a curve (x, y: [points]): the minimum and the maximum of each interval.

    The ends are kept. An interval of NaN only remains a gap.
    """
    if len(y) <= limit:
        return x, y
    edges = np.linspace(0, len(y), (limit - 2) // 2 + 1).astype(int)
    kept = {0, len(y) - 1}
    for start, stop in itertools.pairwise(edges):
        interval = y[start:stop]
        finite = ~np.isnan(interval)
        kept.add(int(start + np.argmin(np.where(finite, interval, np.inf))))
        kept.add(int(start + np.argmax(np.where(finite, interval, -np.inf))))
    chosen = sorted(kept)
    return x[chosen], y[chosen]


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
