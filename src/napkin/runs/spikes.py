"""Loss spikes: steps whose loss stands out from those before it."""

import statistics

WINDOW = 64
"""Number of recent losses that a new one is compared with."""
FEWEST = 16
"""Fewest losses for a comparison."""
THRESHOLD = 6.0
"""Robust standard deviations above the median from which a loss is a spike: one in a billion for normal noise."""

_NORMAL = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""
_LEAST_DEVIATION = 0.005
"""Relative to the median: where losses hardly scatter, one that is off by a percent is not a spike."""


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
    """Add a loss to the recent ones."""
    recent.append(loss)
    del recent[:-WINDOW]
