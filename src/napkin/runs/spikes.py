"""Loss spikes: steps whose loss stands out from those before it."""

import statistics

WINDOW = 64
"""Losses that a new one is compared with."""
FEWEST = 16
"""So many are needed to say what is usual."""
THRESHOLD = 6.0
"""Robust standard deviations over the median from which a loss is marked: of normal noise, one in a billion."""

_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation, of normal numbers."""
_LEAST_DEVIATION = 0.005
"""Of the median: losses that hardly scatter at all are no reason to mark one that is off by a percent."""


def spike(loss: float, recent: list[float]) -> float | None:
    """How many robust standard deviations a loss lies over the median of those before it, if that is far.

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
    """Add a loss to those that later ones are compared with."""
    recent.append(loss)
    del recent[:-WINDOW]
