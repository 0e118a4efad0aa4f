"""Finds the step of a run that takes most memory, and the first step that would run out of it.

Batches of sequences differ, and so do the bytes of their steps. What a step takes does not fall when one of its sizes
grows (rows times length, length, trained tokens), so few steps have to be counted: of those that no other is above in
all sizes, all that might not fit; and between a step that fits and one that does not, those on neither side of what was
counted. Bytes grow by no larger factor than the sizes do, so a step that was counted bounds all others.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from napkin.units import format_bytes

Sizes = Sequence[float]
"""The sizes of a step; its bytes do not fall when one of them grows."""

MOST_COUNTED = 6
"""The most steps that are counted in search of the largest where one does not fit: those with the largest sizes
first."""
MOST_SEARCHED = 32
"""The most steps that are counted in search of the first that does not fit."""


@dataclass(frozen=True)
class LongestStep:
    """The step of a run that takes most memory."""

    number: int
    """Number of the step in the run; the first is 1."""
    n_steps: int
    """The steps that were looked at."""
    shape: str
    """The shape of its largest micro-batch, as "8 × 4,096 tokens"."""
    peak_bytes: int
    is_counted: bool
    """True if the peak was counted. Otherwise it is an upper bound, which is enough where the step fits."""
    step_bytes: int
    """Bytes that a step may take on the device."""
    first_beyond: "BeyondMemory | None" = None

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.step_bytes

    def sentence(self) -> str:
        """Say before the first step which step takes most, and whether it fits."""
        at_most = "" if self.is_counted else "at most "
        of = f"{at_most}{format_bytes(self.peak_bytes)} of {format_bytes(self.step_bytes)} for a step"
        said = f"the longest of {self.n_steps:,} steps is step {self.number:,} with {self.shape}: {of}"
        if self.first_beyond is None:
            return f"{said}: it fits"
        return f"{said}; {self.first_beyond.sentence()}"

    def as_values(self) -> dict[str, Any]:
        """All figures, for JSON."""
        beyond = self.first_beyond
        return {
            "step": self.number,
            "steps": self.n_steps,
            "shape": self.shape,
            "peak_bytes": self.peak_bytes,
            "is_counted": self.is_counted,
            "step_bytes": self.step_bytes,
            "fits": self.fits,
            "first_beyond": None
            if beyond is None
            else {"step": beyond.number, "shape": beyond.shape, "way_out": beyond.way_out},
        }


@dataclass(frozen=True)
class BeyondMemory:
    """The first step for which memory would not be enough."""

    number: int
    shape: str
    way_out: str = ""
    """The settings that would fit; empty if none were searched for."""

    def sentence(self) -> str:
        said = f"memory runs out at step {self.number:,} ({self.shape})"
        return f"{said}: {self.way_out}" if self.way_out else said


def find_longest(
    sizes: Sequence[Sizes],
    peak_of: Callable[[int], int],
    shape_of: Callable[[int], str],
    *,
    step_bytes: int,
    known: Mapping[int, int] | None = None,
    way_out: Callable[[int], str] = lambda step: "",
) -> LongestStep:
    """The step that takes most memory, and the first that does not fit into `step_bytes`.

    Where the bytes of steps that are known show that all fit, none is counted, and the one with the largest sizes is
    the longest.

    Args:
        sizes: of each step.
        peak_of: counts a step, by its place in `sizes`.
        shape_of: the shape of its largest micro-batch, for messages.
        step_bytes: the memory that a step may take.
        known: peaks of steps that were counted already, by their places.
        way_out: what would fit instead of a step that does not.
    """
    table = np.asarray(sizes, dtype=np.float64)
    counted = {tuple(table[place]): peak for place, peak in (known or {}).items()}

    def peak(place: int) -> int:
        key = tuple(table[place])
        if key not in counted:
            counted[key] = peak_of(place)
        return counted[key]

    def at_most(place: int) -> float:
        if tuple(table[place]) in counted:
            return peak(place)
        bounds = [math.inf, *(peak_bytes * _growth(np.array(key), table[place]) for key, peak_bytes in counted.items())]
        return min(bounds)

    candidates = _maximal(table)
    for number, place in enumerate(candidates):
        # Once one does not fit, the figure of the largest may be that of the next best.
        if number >= MOST_COUNTED and max(counted.values()) > step_bytes:
            candidates = candidates[:number]
            break
        if at_most(place) > step_bytes:
            peak(place)
    worst = max(candidates, key=at_most)
    beyond = None
    if at_most(worst) > step_bytes:
        index = _first_beyond(table, peak, step_bytes, worst)
        beyond = BeyondMemory(index + 1, shape_of(index), way_out(index))
    is_counted = tuple(table[worst]) in counted
    return LongestStep(worst + 1, len(table), shape_of(worst), int(at_most(worst)), is_counted, step_bytes, beyond)


def _growth(sizes: np.ndarray, larger: np.ndarray) -> float:
    """The largest factor between the sizes of two steps, at least 1."""
    if ((sizes == 0) & (larger > 0)).any():
        return math.inf
    positive = sizes > 0
    return float(max(1.0, (larger[positive] / sizes[positive]).max(initial=1.0)))


def _maximal(table: np.ndarray) -> list[int]:
    """The first steps of all whose sizes no other step is above, those with the largest sizes first."""
    unique, places = np.unique(table, axis=0, return_index=True)
    order = np.argsort(-_scale(unique), kind="stable")
    kept: list[int] = []
    for row in order:
        if not any((unique[other] >= unique[row]).all() for other in kept):
            kept.append(int(row))
    return [int(places[row]) for row in kept]


def _first_beyond(table: np.ndarray, peak: Callable[[int], int], most: int, beyond: int) -> int:
    """The first step that does not fit: `beyond` does not."""
    # Counting the middle one in the order of size bounds the most others.
    order = list(np.argsort(_scale(table), kind="stable"))
    low, high = 0, order.index(beyond)
    fitting: list[int] = []
    too_large: list[int] = [beyond]
    searched = 0
    while low < high:
        middle = (low + high) // 2
        searched += 1
        if peak(int(order[middle])) <= most:
            fitting.append(int(order[middle]))
            low = middle + 1
        else:
            too_large.append(int(order[middle]))
            high = middle
    edge = _scale(table)[order[high]]
    for place in range(len(table)):
        if any((table[other] >= table[place]).all() for other in fitting):
            continue
        if any((table[other] <= table[place]).all() for other in too_large):
            return place
        if searched >= MOST_SEARCHED:
            if _scale(table)[place] >= edge:
                return place
            continue
        searched += 1
        if peak(place) > most:
            return place
        fitting.append(place)
    return beyond


def _scale(table: np.ndarray) -> np.ndarray:
    """A number that grows with all sizes of a step."""
    return (table / np.maximum(table.max(axis=0, initial=0.0), 1e-300)).sum(axis=1)


def largest_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` of which `fits` is true, by bisection to within a 256th of the range; 0
    where not even `low` does."""
    if not fits(low):
        return 0
    for _ in range(8):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
