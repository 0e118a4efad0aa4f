"""The uncertainty of a score: means with clustered standard errors, paired differences, and what a sample can tell
apart.

Items of one group, such as rewordings of one question, are right or wrong together. With residuals r and G groups, the
variance of the mean of n items is

    G/(G-1) · sum over groups of (sum of the group's r)² / n²          (Liang & Zeger 1986; Miller 2024, section 2.2)

which is s²/n where each item is a group of its own.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from napkin.errors import NapkinError

CONFIDENCE = 0.95
POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """A mean, how sure it is, and of what."""

    mean: float
    standard_error: float
    low: float
    """Lower end of the interval of 95% confidence."""
    high: float
    items: int
    groups: int


@dataclass(frozen=True)
class PairedDifference:
    """The difference of two models' scores on the same items: those of the first minus those of the second."""

    difference: float
    standard_error: float
    """The standard error of the differences item by item."""
    low: float
    high: float
    p_value: float
    """Two-sided: the probability of such a difference between equal models."""
    test: str
    """The hypothesis test that the p-value is of."""
    items: int
    groups: int
    discordance: float
    """The share of items on which the two differ."""
    detectable: float
    """The difference that such a comparison finds in four of five repetitions, see `detectable_difference`."""
    unpaired_standard_error: float
    """Standard error of the difference if the two models had been scored on different items."""


def mean_estimate(values: Sequence[float], groups: Sequence[Hashable] | None = None) -> Estimate:
    """The mean of scores with its clustered standard error and interval.

    `groups` has each item's group; None makes each one its own. The interval is Wilson's (1927) where all scores are 0
    or 1, at the number of independent items that has the clustered standard error (Korn & Graubard 1998); otherwise
    Student's t with a degree of freedom fewer than groups. Raises NapkinError where there are no scores.
    """
    scores, labels, n_groups = _checked(values, groups)
    mean = float(scores.mean())
    error = _clustered_error(scores - mean, labels, n_groups)
    if np.isin(scores, (0.0, 1.0)).all():
        low, high = _wilson(mean, error, len(scores), n_groups)
    elif n_groups == 1:
        low, high = -math.inf, math.inf
    else:
        low, high = (mean + sign * _t_quantile(n_groups) * error for sign in (-1, 1))
    return Estimate(mean, error, low, high, len(scores), n_groups)


def paired_difference(
    first: Sequence[float], second: Sequence[float], groups: Sequence[Hashable] | None = None
) -> PairedDifference:
    """Compare two models by their scores on the same items, in the same order.

    The p-value is that of McNemar's exact test where scores are 0 or 1 and each item is its own group; otherwise of
    Student's t on the clustered standard error. Where the two agree on all items, the interval is what a rate of
    disagreement may be that n items did not show (Clopper & Pearson 1934). Raises NapkinError for fewer than two groups
    or different numbers of scores.
    """
    if len(first) != len(second):
        raise NapkinError(f"{len(first)} scores are to be compared with {len(second)}: compare those of the same items")
    from scipy import stats

    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    differences, labels, n_groups = _checked(differences.tolist(), groups)
    if n_groups < 2:
        raise NapkinError("two models are compared on at least two groups of items: use more items")
    n, mean = len(differences), float(differences.mean())
    error = _clustered_error(differences - mean, labels, n_groups)
    discordance = float(np.mean(differences != 0))
    binary = np.isin(first, (0.0, 1.0)).all() and np.isin(second, (0.0, 1.0)).all()
    if binary and n_groups == n:
        wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
        p_value = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
        test = "McNemar's exact test"
    else:
        p_value = float(2 * stats.t.sf(abs(mean) / error, n_groups - 1)) if error else float(mean == 0)
        test = "t test of paired differences"
    reach = _t_quantile(n_groups) * error if discordance else 1 - (1 - CONFIDENCE) ** (1 / n_groups)
    unpaired = math.hypot(*(mean_estimate(scores, groups).standard_error for scores in (first, second)))
    z_sum = float(stats.norm.isf((1 - CONFIDENCE) / 2) + stats.norm.ppf(POWER))
    detectable = detectable_difference(n_groups, discordance) if binary else z_sum * error
    return PairedDifference(
        mean, error, mean - reach, mean + reach, p_value, test, n, n_groups, discordance, detectable, unpaired
    )


def detectable_difference(items: int, discordance: float, *, power: float = POWER) -> float:
    """The smallest difference in accuracy that a paired comparison on so many items finds with probability `power`.

    At a two-sided level of 5%, if the models disagree on a share ψ, `discordance`, of the items; it is the larger root
    of δ·sqrt(n) = z(0.975)·sqrt(ψ) + z(power)·sqrt(ψ - δ²) (Connor 1987). A difference cannot exceed the disagreement:
    where even the largest possible one is not detectable, the result is infinite.
    """
    if not 0 <= discordance <= 1:
        raise NapkinError(f"the share of items on which two models differ is {discordance}: use 0 to 1")
    from scipy import stats

    level, beta = float(stats.norm.isf((1 - CONFIDENCE) / 2)), float(stats.norm.ppf(power))
    radicand = items - level**2 + beta**2
    if radicand < 0:
        return math.inf
    found = math.sqrt(discordance) * (level * math.sqrt(items) + beta * math.sqrt(radicand)) / (items + beta**2)
    return found if found <= discordance else math.inf


def _checked(values: Sequence[float], groups: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray, int]:
    """The scores, each one's group as a number, and how many groups there are."""
    scores = np.asarray(values, dtype=np.float64)
    if not len(scores):
        raise NapkinError("there are no scores: use at least one item")
    labels, n_groups = numbered_groups(groups or range(len(scores)))
    if len(labels) != len(scores):
        raise NapkinError(f"{len(scores)} scores have {len(labels)} groups: name the group of each")
    return scores, labels, n_groups


def numbered_groups(groups: Iterable[Hashable]) -> tuple[np.ndarray, int]:
    """The number of each item's group, counted from 0 in the order in which they occur, and how many groups there
    are."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64), len(numbers)


def _clustered_error(residuals: np.ndarray, labels: np.ndarray, n_groups: int) -> float:
    """The standard error of the mean; 0 for a single group, which does not determine it."""
    if n_groups < 2:
        return 0.0
    sums = np.bincount(labels, weights=residuals, minlength=n_groups)
    return math.sqrt(n_groups / (n_groups - 1) * float(np.square(sums).sum())) / len(residuals)


def _wilson(mean: float, error: float, n_items: int, n_groups: int) -> tuple[float, float]:
    from scipy import stats

    if n_groups == 1 < n_items:
        return 0.0, 1.0
    # Without an error, all groups agree: each counts as one item.
    independent = n_items / (n_items - 1) * mean * (1 - mean) / error**2 if error else n_groups
    z = float(stats.norm.isf((1 - CONFIDENCE) / 2)) if n_groups == n_items else _t_quantile(n_groups)
    centre = (mean + z**2 / (2 * independent)) / (1 + z**2 / independent)
    reach = z * math.sqrt(mean * (1 - mean) / independent + z**2 / (4 * independent**2)) / (1 + z**2 / independent)
    return max(0.0, centre - reach), min(1.0, centre + reach)


def _t_quantile(n_groups: int) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, n_groups - 1))
