"""Differences between two models without a distribution assumed: the randomization test, the bootstrap, and the
correction for several comparisons.

Under equal models each group's difference is as likely with either sign. The randomization test (Fisher 1935) compares
the sum of the differences with those of all 2^G assignments of signs, or of a sample of them; the bootstrap (Efron
1979) draws groups with replacement, and its interval is that of the middle 95% of the means. Both take items of a group
together. Of scores of 0 and 1 with a group for each item the test is McNemar's exact one.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from napkin.errors import NapkinError
from napkin.evaluation.uncertainty import numbered_groups

DRAWS = 10_000
_EXACT_GROUPS = 16
"""Groups with a difference up to which all assignments of signs are counted."""
_CHUNK = 2**22
"""Random numbers that are drawn at a time."""
_ROUNDING = 1e-9
"""Sums that differ by less, relatively, are equal."""


@dataclass(frozen=True)
class ResampledDifference:
    """The difference of two models' scores on the same items by resampling."""

    difference: float
    low: float
    """Lower end of the bootstrap's interval of 95%."""
    high: float
    p_value: float
    """Two-sided, of the randomization test."""
    exact: bool
    """True if all assignments of signs were counted, and not a sample."""
    draws: int
    """Samples of the bootstrap, and of the test unless it is exact."""


def resampled_difference(
    first: Sequence[float],
    second: Sequence[float],
    groups: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    draws: int = DRAWS,
) -> ResampledDifference:
    """Compare two models by their scores on the same items, in the same order; `groups` as in `paired_difference`.

    Raises NapkinError for fewer than two groups or different numbers of scores.
    """
    if len(first) != len(second) or (groups is not None and len(groups) != len(first)):
        raise NapkinError(f"{len(first)} scores are to be compared with {len(second)}: compare those of the same items")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    labels, n_groups = numbered_groups(groups or range(len(first)))
    if n_groups < 2:
        raise NapkinError("two models are compared on at least two groups of items: use more items")
    sums, sizes = np.bincount(labels, weights=differences), np.bincount(labels)
    random = np.random.default_rng(seed)
    p_value, exact = _randomization_p_value(sums[sums != 0], random, draws)
    means = _bootstrap_means(sums, sizes, random, draws)
    low, high = np.quantile(means, (0.025, 0.975))
    return ResampledDifference(float(differences.mean()), float(low), float(high), p_value, exact, draws)


def _randomization_p_value(sums: np.ndarray, random: np.random.Generator, draws: int) -> tuple[float, bool]:
    least = abs(sums.sum()) - _ROUNDING * np.abs(sums).sum()
    if len(sums) <= _EXACT_GROUPS:
        totals = np.zeros(1)
        for each in sums:
            totals = np.concatenate((totals + each, totals - each))
        return float(np.mean(np.abs(totals) >= least)), True
    as_large, rows = 0, max(1, _CHUNK // len(sums))
    for start in range(0, draws, rows):
        signs = random.integers(0, 2, size=(min(rows, draws - start), len(sums)), dtype=np.int8)
        as_large += int((np.abs(sums.sum() - 2 * (signs @ sums)) >= least).sum())
    # The observed assignment counts as one of them: without it a p-value could be 0.
    return (as_large + 1) / (draws + 1), False


def _bootstrap_means(sums: np.ndarray, sizes: np.ndarray, random: np.random.Generator, draws: int) -> np.ndarray:
    found, rows = [], max(1, _CHUNK // len(sums))
    for start in range(0, draws, rows):
        drawn = random.integers(0, len(sums), size=(min(rows, draws - start), len(sums)))
        found.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    return np.concatenate(found)


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Each p-value adjusted for all comparisons (Holm 1979), in their order: below 5% together, at most one family in
    twenty of equal pairs has any that is.

    >>> holm_adjusted([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda each: p_values[each])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted
