"""What benchmarks share about time: contestants that take turns, and medians with the intervals that hold them.

What slows the machine down for a while meets all contestants of a round, so a ratio is that of the samples of the same
round, and its median counts. In brackets stands the interval that contains the median of repeated measurements with a
probability of 95%; below six samples it is from the least to the largest, which is surer of less.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from napkin.hardware.sampling import Interval, median_interval, ratio_interval

BRACKETS = "Figures are medians; in brackets is the 95% interval of the median, below six samples the whole range."
Samples = dict[str, list[float]]
"""Of each contestant, a sample per round."""
Shown = Callable[[float], str]


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    begin = clock()
    work()
    return clock() - begin


def in_turns(contestants: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """What each contestant returns, round by round; every second round goes backwards, so that drift favours none."""
    samples: Samples = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            samples[name].append(contestants[name]())
    return samples


def fastest(samples: Mapping[str, Sequence[float]], among: Iterable[str] | None = None) -> str:
    """The contestant whose median is the least, of all or of some."""
    return min(samples if among is None else among, key=lambda name: statistics.median(samples[name]))


def spread(samples: Sequence[float], shown: Shown = "{:.2f}".format) -> str:
    """A median with its interval, such as 1.31 (1.28 to 1.36)."""
    return told(median_interval(samples), shown)


def ratio_spread(first: Sequence[float], second: Sequence[float], shown: Shown = "{:.2f}".format) -> str:
    """The median of first / second, round by round, with its interval."""
    return told(ratio_interval(first, second), shown)


def told(interval: Interval, shown: Shown = "{:.2f}".format) -> str:
    """An interval as `spread` shows it."""
    if interval.samples == 1:
        return f"{shown(interval.median)} (once)"
    return f"{shown(interval.median)} ({shown(interval.low)} to {shown(interval.high)})"
