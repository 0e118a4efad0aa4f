"""Intervals of medians contain the median as often as they say; ratios of pairs do not see what drifts."""

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.hardware.sampling import interval_rank, median_interval, ratio_interval


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("samples", [2, 5, 6, 9, 10, 25, 100, 301])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_the_rank_is_the_quantile_of_a_binomial_distribution(samples: int, confidence: float) -> None:
    from scipy import stats

    rank, coverage = interval_rank(samples, confidence)
    assert coverage == pytest.approx(1 - 2 * stats.binom.cdf(rank - 1, samples, 0.5))
    assert rank == 1 or coverage >= confidence
    if 2 * rank < samples - 1:
        assert 1 - 2 * stats.binom.cdf(rank, samples, 0.5) < confidence, "a narrower one would do"


@pytest.mark.parametrize("draw", ["lognormal", "standard_cauchy", "exponential"])
@pytest.mark.parametrize("samples", [6, 20, 101])
def test_simulated_intervals_contain_the_median_as_often_as_they_say(draw: str, samples: int) -> None:
    medians = {"lognormal": 1.0, "standard_cauchy": 0.0, "exponential": float(np.log(2))}
    drawn = getattr(np.random.default_rng(samples), draw)(size=(4000, samples))
    intervals = [median_interval(row.tolist()) for row in drawn]
    contain = np.mean([each.low <= medians[draw] <= each.high for each in intervals])
    coverage = intervals[0].coverage
    assert coverage >= 0.95
    # Five standard deviations of 4000 trials.
    assert abs(contain - coverage) < 5 * (coverage * (1 - coverage) / 4000) ** 0.5


def test_few_samples_are_less_sure_and_say_so() -> None:
    three = median_interval([3.0, 1.0, 2.0])
    assert (three.median, three.low, three.high, three.coverage) == (2.0, 1.0, 3.0, 0.75)
    assert three.relative_width == 0.5
    one = median_interval([7.0])
    assert (one.median, one.low, one.high, one.coverage) == (7.0, 7.0, 7.0, 0.0)
    with pytest.raises(NapkinError, match="no samples"):
        median_interval([])


def test_a_drift_that_hides_a_ratio_of_medians_leaves_that_of_pairs() -> None:
    drift = np.linspace(1, 10, 50)
    noise = np.random.default_rng(0).lognormal(0, 0.01, (2, 50))
    first, second = (1.1 * drift * noise[0]).tolist(), (drift * noise[1]).tolist()
    ratio = ratio_interval(first, second)
    assert ratio.low < 1.1 < ratio.high
    assert ratio.high - ratio.low < 0.02
    assert median_interval(first).low < median_interval(second).high, "the medians alone do not tell them apart"
    with pytest.raises(NapkinError, match=r"2 samples.*compared.*1"):
        ratio_interval([1.0, 2.0], [1.0])
