"""How a mixture's proportions come about, and how they change during training.

Files are weighted by their lengths with a temperature (Devlin et al. 2018, multilingual BERT: exponentially smoothed
weighting), no file is read more often than a number of epochs (as in UniMax, Chung et al. 2023), and the proportions
may change at steps (a curriculum).
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import fsum, isfinite

import numpy as np
from numpy.typing import NDArray

from napkin.data.mixing import Interleaving
from napkin.errors import NapkinError


def temperature_weights(lengths: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Weights in proportion to lengths^(1/temperature): 1 is proportional, infinity the same for all.

    Raises NapkinError for a temperature that is not above 0.

    >>> [round(weight, 3) for weight in temperature_weights([100, 1], 2.0)]
    [0.909, 0.091]
    """
    if not temperature > 0:
        raise NapkinError(f"a temperature of {temperature} is not possible: use a number above 0")
    # Relative to the largest, no power overflows.
    powers = [(length / max(lengths)) ** (1 / temperature) for length in lengths]
    return tuple(power / fsum(powers) for power in powers)


def shares_within(weights: Sequence[float], amount: float, capacities: Sequence[float]) -> tuple[float, ...] | None:
    """Divide `amount` in proportion to `weights`, no part above its capacity; what is left over goes to the others in
    proportion to their weights. None where the capacities of those with a weight are less than `amount`.

    >>> shares_within([1, 1, 2], 80, [10, 100, 100])
    (10.0, 23.333333333333332, 46.666666666666664)
    """
    shares = [0.0] * len(weights)
    free = {number for number, weight in enumerate(weights) if weight > 0}
    rest = float(amount)
    while free:
        total = fsum(weights[number] for number in free)
        full = {number for number in free if rest * weights[number] / total > capacities[number]}
        if not full:
            for number in free:
                shares[number] = rest * weights[number] / total
            return tuple(shares)
        for number in full:
            shares[number] = float(capacities[number])
        rest -= fsum(capacities[number] for number in full)
        free -= full
    return tuple(shares) if rest <= 1e-9 * amount else None


class PhasedInterleaving:
    """Interleavings one after another: each phase goes on where a source was left, a pure function of its weights.

    `phases` are the first element of each phase, which start with 0 and increase, and the weights from there on; a
    source of weight 0 gives nothing. It is called as `Interleaving` is. Raises NapkinError for weights that are
    negative, not finite, or all 0.

    >>> interleaving = PhasedInterleaving([(0, [1, 0]), (3, [1, 1])])
    >>> [places.tolist() for _, places in interleaving(0, 7)]
    [[0, 1, 2, 4, 6], [3, 5]]
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        self._starts = [start for start, _ in phases]
        if self._starts[:1] != [0] or sorted(set(self._starts)) != self._starts:
            raise NapkinError(f"phases that start at {self._starts} are not possible: start with 0, and increase")
        self._phases = [_Phase(weights) for _, weights in phases]
        self.proportions = [phase.proportions for phase in self._phases]
        n_sources = len(phases[0][1])
        self._before = [[0] * n_sources]
        for number, (start, end) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            given = self._phases[number].given(end - start)
            self._before.append([sum(both) for both in zip(self._before[-1], given, strict=True)])

    def __call__(self, start: int, length: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Assign elements `start` to `start + length` to the sources: for each how many of its elements came before,
        and the positions of its next ones."""
        found: list[tuple[int, list[NDArray[np.int64]]]] = []
        first = begin = start
        while begin < start + length or not found:
            number = bisect_right(self._starts, begin) - 1
            ends = [*self._starts[number + 1 : number + 2], start + length]
            end = min(start + length, *ends)
            assigned = self._phases[number](begin - self._starts[number], end - begin)
            if not found:
                found = [(before + more, []) for before, (more, _) in zip(self._before[number], assigned, strict=True)]
            for (_, parts), (_, places) in zip(found, assigned, strict=True):
                parts.append(places + (begin - first))
            if end == begin:
                break
            begin = end
        return [(before, np.concatenate(parts)) for before, parts in found]


class _Phase:
    """An interleaving of the sources with a weight; the others give nothing."""

    def __init__(self, weights: Sequence[float]) -> None:
        wrong = next((weight for weight in weights if not (isfinite(weight) and weight >= 0)), None)
        if wrong is not None or not any(weights):
            raise NapkinError(f"weights of {list(weights)} are not possible: use numbers from 0, not all of them 0")
        self._sources = [number for number, weight in enumerate(weights) if weight > 0]
        self._interleaving = Interleaving([weights[number] for number in self._sources])
        self._n = len(weights)
        shares = dict(zip(self._sources, self._interleaving.proportions, strict=True))
        self.proportions = tuple(shares.get(number, 0.0) for number in range(self._n))

    def __call__(self, start: int, length: int) -> list[tuple[int, NDArray[np.int64]]]:
        assigned = dict(zip(self._sources, self._interleaving(start, length), strict=True))
        return [assigned.get(number, (0, np.empty(0, np.int64))) for number in range(self._n)]

    def given(self, length: int) -> list[int]:
        return [before for before, _ in self(length, 0)]
