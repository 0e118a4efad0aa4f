"""Samples of what calls take: warmed up, with a warm or a cold cache, and in turns where calls are to be compared.

A median's interval lies between order statistics. Of n independent samples, the number below the median of their
distribution is binomial with probability 1/2: the interval from the r-th smallest to the r-th largest misses it with
probability 2 · P(Bin(n, 1/2) < r), exactly where the distribution is continuous and at most elsewhere (David & Nagaraja
2003, "Order Statistics", section 7.1). Seconds have a long tail, and no meaningful variance: neither a mean nor a t
interval describes them.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from napkin.errors import NapkinError
from napkin.hardware.timing import event_seconds, wall_seconds

SHORTEST_SAMPLE = {"cpu": 2e-4, "cuda": 1e-3}
"""Seconds of the shortest sample: shorter calls are timed several at a time."""
LONGEST_WARM = 0.02
"""Seconds: after a longer call of something else, nothing of this call is left in a cache."""
LEAST_CACHE_BYTES = 32 * 2**20
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Timed:
    """A call to time; `prepare` runs before each call and is not timed."""

    call: Callable[[], object]
    prepare: Callable[[], object] | None = None

    def run(self) -> None:
        """Run the call once."""
        if self.prepare is not None:
            self.prepare()
        self.call()


Clock = Callable[[Callable[[], object], int], float]
"""Makes a number of calls in a row and returns the seconds of one."""


@dataclass(frozen=True)
class Sampling:
    """The number of samples, and how they are taken."""

    seconds: float = 0.5
    """Seconds of measuring one call; then there are enough samples if there are `least`."""
    least: int = 6
    """Six are the fewest whose median has an interval of 95%."""
    most: int = 300
    shortest: float = SHORTEST_SAMPLE["cpu"]
    evict: Callable[[], object] | None = None
    """Empties the caches before each sample; None leaves them as the call before left them."""


def device_clock(device_type: str) -> Clock:
    """The wall clock for a CPU, events for a GPU."""
    if device_type == "cuda":
        return event_seconds
    return lambda call, calls: wall_seconds(call, device_type, calls)


def sample_in_turns(
    timed: Sequence[Timed],
    clock: Clock,
    sampling: Sampling,
    *,
    now: Callable[[], float] = time.perf_counter,
    progress: Callable[[float], None] = lambda fraction: None,
) -> list[list[float]]:
    """Seconds of each call, as many samples of each: sample i of one and of another were taken one after the other.

    Every second round goes backwards, A B B A, so that a steady drift favours none. Each call is made twice before its
    first sample, so that no sample includes compiling, allocating or mapping.
    """
    once, calls = list[float](), list[int]()
    for each in timed:
        each.run()
        if each.prepare is not None:
            each.prepare()
        once.append(clock(each.call, 1))
        alone = each.prepare is not None or sampling.evict is not None
        calls.append(1 if alone else max(1, math.ceil(sampling.shortest / max(once[-1], 1e-9))))
    samples: list[list[float]] = [[] for _ in timed]
    begin, budget = now(), sampling.seconds * len(timed)
    while len(samples[0]) < sampling.least or (len(samples[0]) < sampling.most and now() - begin < budget):
        forward = len(samples[0]) % 2 == 0
        for number in range(len(timed)) if forward else reversed(range(len(timed))):
            each = timed[number]
            if len(timed) > 1 and sampling.evict is None and once[number] < LONGEST_WARM:
                # The other calls have used the cache meanwhile.
                each.run()
            if each.prepare is not None:
                each.prepare()
            if sampling.evict is not None:
                sampling.evict()
            samples[number].append(clock(each.call, calls[number]))
        progress(min(1.0, max((now() - begin) / budget if budget else 0.0, len(samples[0]) / sampling.most)))
    return samples


def cache_bytes(device_type: str, folder: Path = _CPU_CACHES) -> int:
    """Bytes of the device's last cache; 32 MiB where the system does not tell."""
    if device_type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0)) or LEAST_CACHE_BYTES
    sizes = [LEAST_CACHE_BYTES]
    for path in folder.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 0)
        sizes.append(int(text[:-1]) * unit if text[:-1].isdecimal() else 0)
    return max(sizes)


def evictor(device_type: str) -> Callable[[], object]:
    """A function that empties the caches: it writes twice as many bytes as the last one holds."""
    buffer = torch.zeros(2 * cache_bytes(device_type) // 4, device=device_type)
    return lambda: buffer.add_(1)


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
