import math

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.evaluation.uncertainty import detectable_difference, mean_estimate, paired_difference


def test_of_independent_items_the_error_and_the_interval_are_scipys() -> None:
    from scipy import stats

    scores = [1.0] * 37 + [0.0] * 13
    found = mean_estimate(scores)
    assert found.standard_error == pytest.approx(stats.sem(scores))
    interval = stats.binomtest(37, 50).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    values = np.random.default_rng(0).normal(size=30).tolist()
    found = mean_estimate(values)
    expected = stats.t.interval(0.95, 29, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)


def test_items_that_repeat_each_other_count_once() -> None:
    scores = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    alone = mean_estimate(scores)
    repeated = mean_estimate([score for score in scores for _ in range(5)], [n for n in range(7) for _ in range(5)])
    assert repeated.standard_error == pytest.approx(alone.standard_error)
    assert (repeated.items, repeated.groups) == (35, 7)


@pytest.mark.parametrize("mean", [0.3, 0.9])
def test_clustered_intervals_cover_the_truth(mean: float) -> None:
    draw = np.random.default_rng(1)
    covered = naive = 0
    for _ in range(500):
        # Items of a group share half of their variance.
        of_group = draw.beta(mean, 1 - mean, size=60)
        scores = (draw.random((60, 4)) < of_group[:, None]).astype(float)
        groups = np.repeat(np.arange(60), 4).tolist()
        found = mean_estimate(scores.ravel().tolist(), groups)
        covered += found.low <= mean <= found.high
        alone = mean_estimate(scores.ravel().tolist())
        naive += alone.low <= mean <= alone.high
    # 95% of 500, within three standard errors; intervals that ignore groups are too short.
    assert 460 <= covered <= 490
    assert naive < 440


def test_a_paired_comparison_is_that_of_scipy() -> None:
    from scipy import stats

    draw = np.random.default_rng(2)
    first, second = (draw.random((2, 80)) < [[0.7], [0.5]]).astype(float)
    found = paired_difference(first.tolist(), second.tolist())
    assert found.difference == pytest.approx(first.mean() - second.mean())
    assert found.standard_error == pytest.approx(stats.sem(first - second))
    wins, losses = int(((first - second) > 0).sum()), int(((first - second) < 0).sum())
    assert found.p_value == pytest.approx(stats.binomtest(wins, wins + losses).pvalue)
    assert found.discordance == pytest.approx((wins + losses) / 80)
    values = draw.normal(size=(2, 20))
    found = paired_difference(values[0].tolist(), values[1].tolist())
    expected = stats.ttest_rel(values[0], values[1])
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))


def test_equal_models_differ_significantly_in_one_of_twenty_comparisons_at_most() -> None:
    draw = np.random.default_rng(3)
    significant = covered = 0
    for _ in range(500):
        difficulty = draw.random(100)
        first, second = (draw.random((2, 100)) < difficulty).astype(float)
        found = paired_difference(first.tolist(), second.tolist())
        significant += found.p_value < 0.05
        covered += found.low <= 0 <= found.high
    # The exact test is conservative.
    assert significant <= 34
    assert 460 <= covered <= 490


@pytest.mark.parametrize(("items", "discordance"), [(500, 0.2), (200, 0.5), (2000, 0.05)])
def test_the_detectable_difference_is_found_in_four_of_five_comparisons(items: int, discordance: float) -> None:
    from scipy import stats

    delta = detectable_difference(items, discordance)
    draw = np.random.default_rng(4)
    wins, losses, _ = draw.multinomial(
        items, [(discordance + delta) / 2, (discordance - delta) / 2, 1 - discordance], size=4000
    ).T
    z = np.abs(wins - losses) / np.sqrt(np.maximum(wins + losses, 1))
    assert np.mean(z > stats.norm.isf(0.025)) == pytest.approx(0.8, abs=0.03)


def test_a_difference_that_cannot_be_found_is_infinite() -> None:
    assert detectable_difference(5, 0.3) == math.inf
    assert detectable_difference(1, 1.0) == math.inf


def test_models_that_never_differ_may_still_differ_elsewhere() -> None:
    found = paired_difference([1.0, 0.0] * 150, [1.0, 0.0] * 150)
    assert (found.difference, found.p_value) == (0, 1)
    # The rule of three: 3/n at most.
    assert found.high == pytest.approx(3 / 300, rel=0.01)
    assert found.low == -found.high


def test_no_scores_or_too_few_groups_are_refused() -> None:
    with pytest.raises(NapkinError, match="no scores"):
        mean_estimate([])
    with pytest.raises(NapkinError, match="at least two groups"):
        paired_difference([1.0, 0.0], [0.0, 0.0], ["a", "a"])
    with pytest.raises(NapkinError, match=r"2 scores.*compared.*1"):
        paired_difference([1.0, 0.0], [1.0])
