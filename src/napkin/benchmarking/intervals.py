"""The uncertainty of a median, whatever the distribution of the samples: intervals between order statistics.

Of n independent samples, the number below the median of their distribution is binomial with probability 1/2. So the
interval from the r-th smallest to the r-th largest misses it with probability 2 · P(Bin(n, 1/2) < r), exactly where
the distribution is continuous and at most elsewhere (David & Nagaraja 2003, "Order Statistics", section 7.1). Seconds
have a long tail and no variance to speak of: neither a mean nor a t interval says anything of them.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from napkin.errors import NapkinError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A median, and where that of the distribution lies."""

    median: float
    low: float
    high: float
    coverage: float
    """The probability with which such an interval contains the median; below the wanted one where samples are few."""
    samples: int

    @property
    def relative_width(self) -> float:
        """The larger distance from the median to an end, over the median."""
        return max(self.high - self.median, self.median - self.low) / self.median


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median of independent samples, and its narrowest interval between order statistics.

    Below six samples no interval reaches 95%: it is then from the least to the largest, and `coverage` says how sure
    that is. Raises NapkinError where there is no sample.
    """
    if not samples:
        raise NapkinError("there are no samples: measure at least one")
    ordered = sorted(samples)
    rank, coverage = interval_rank(len(ordered), confidence)
    return Interval(statistics.median(ordered), ordered[rank - 1], ordered[-rank], coverage, len(ordered))


def ratio_interval(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median of first / second, pair by pair: what drifts over a measurement is in both of a pair and cancels.

    Raises NapkinError where the numbers of samples differ, or there are none.
    """
    if len(first) != len(second):
        raise NapkinError(f"{len(first)} samples are to be compared with {len(second)}: measure them in pairs")
    return median_interval([one / other for one, other in zip(first, second, strict=True)], confidence)


def interval_rank(samples: int, confidence: float = CONFIDENCE) -> tuple[int, float]:
    """The largest r for which the interval from the r-th smallest to the r-th largest of n samples is sure enough, at
    least 1, and how sure it is.

    >>> interval_rank(6), interval_rank(10)
    ((1, 0.96875), (2, 0.978515625))
    """
    # Outcomes of n fair coins of which at most `rank - 1` are heads, in units of 2^-n: whole numbers, so exact.
    outcomes, below, rank = 2**samples, 1, 1
    while rank < (samples + 1) // 2:
        wider = below + math.comb(samples, rank)
        if 1 - 2 * wider / outcomes < confidence:
            break
        below, rank = wider, rank + 1
    return rank, 1 - 2 * below / outcomes if samples > 1 else 0.0
