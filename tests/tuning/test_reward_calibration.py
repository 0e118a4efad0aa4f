"""Calibration of a reward model: reliability by bins, against counts by hand."""

import math

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.tuning.preferences import calibration_of


def test_a_model_that_is_right_as_often_as_it_says_has_no_error() -> None:
    margins = [math.log(2)] * 2 + [-math.log(2)] + [math.log(7)] * 7 + [-math.log(7)]
    found = calibration_of(margins)
    assert found.expected_error == pytest.approx(0, abs=1e-12)
    assert found.accuracy == 9 / 11
    assert [(each.low, each.pairs) for each in found.bins] == [(pytest.approx(0.65), 3), (pytest.approx(0.85), 8)]
    assert calibration_of([2 * each for each in margins]).expected_error > 0.05


def test_bins_and_errors_equal_those_pair_by_pair() -> None:
    margins = np.random.default_rng(0).normal(0.5, 2, 400)
    margins[:3] = 0
    found = calibration_of(margins, bins=7)
    bins: dict[int, list[tuple[float, float]]] = {}
    for margin in margins:
        p = 1 / (1 + math.exp(-margin))
        side = max(p, 1 - p)
        bins.setdefault(min(int((side - 0.5) * 14), 6), []).append((side, 0.5 if margin == 0 else float(margin > 0)))
    error = sum(abs(sum(p for p, _ in each) - sum(right for _, right in each)) for each in bins.values()) / 400
    assert found.expected_error == pytest.approx(error)
    assert [each.pairs for each in found.bins] == [len(bins[number]) for number in sorted(bins)]
    assert found.loss == pytest.approx(float(np.mean([-math.log(1 / (1 + math.exp(-each))) for each in margins])))


@pytest.mark.parametrize("margins", [[], [math.nan], [1.0, math.inf]])
def test_margins_that_say_nothing_are_refused(margins: list[float]) -> None:
    with pytest.raises(NapkinError, match="have no calibration"):
        calibration_of(margins)
