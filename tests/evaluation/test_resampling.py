"""Resampling beside scipy, McNemar's exact test and the definition of Holm's procedure."""

import itertools
import random

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.evaluation.resampling import holm_adjusted, resampled_difference
from napkin.evaluation.uncertainty import paired_difference


def test_of_right_and_wrong_items_the_test_is_mcnemars() -> None:
    draw = np.random.default_rng(0)
    for wins, losses in ((9, 1), (3, 3), (0, 6), (12, 4)):
        first = [1.0] * wins + [0.0] * losses + draw.integers(0, 2, 20).astype(float).tolist()
        second = [0.0] * wins + [1.0] * losses + first[wins + losses :]
        found = resampled_difference(first, second, draws=100)
        assert found.exact
        assert found.p_value == pytest.approx(paired_difference(first, second).p_value, abs=1e-12)


def test_the_sampled_test_and_the_interval_are_scipys() -> None:
    from scipy import stats

    differences = np.random.default_rng(1).normal(0.15, 1, size=60)
    found = resampled_difference(differences.tolist(), [0.0] * 60, draws=20_000)
    assert not found.exact
    expected = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(2)
    )
    spread = np.sqrt(expected.pvalue * (1 - expected.pvalue) / 20_000)
    assert abs(found.p_value - expected.pvalue) < 6 * spread
    interval = stats.bootstrap(
        (differences,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(3)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.02)


def test_items_of_a_group_change_sign_together() -> None:
    scores, groups = [1.0, 0.5, 0.0, 1.0, 0.25, 0.0], ["a", "a", "b", "b", "c", "d"]
    found = resampled_difference(scores, [0.5] * 6, groups)
    sums = [0.5, 0.0, -0.25, -0.5]
    totals = [
        abs(sum(sign * each for sign, each in zip(signs, sums, strict=True)))
        for signs in itertools.product((1, -1), repeat=4)
    ]
    assert found.p_value == np.mean([total >= abs(sum(sums)) - 1e-12 for total in totals])


def test_equal_models_are_equal() -> None:
    found = resampled_difference([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (found.p_value, found.low, found.high) == (1.0, 0.0, 0.0)
    with pytest.raises(NapkinError, match="at least two groups"):
        resampled_difference([1.0, 0.0], [1.0, 1.0], ["a", "a"])


def test_holms_procedure_rejects_what_its_definition_rejects() -> None:
    draw = random.Random(4)
    for _ in range(200):
        p_values = [draw.random() ** 3 for _ in range(draw.randint(1, 7))]
        level = draw.random()
        rejected = set[int]()
        # Step down: the smallest at level/m, the next at level/(m-1), until one fails.
        for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
            if p_values[place] > level / (len(p_values) - rank):
                break
            rejected.add(place)
        assert {place for place, p in enumerate(holm_adjusted(p_values)) if p <= level} == rejected
