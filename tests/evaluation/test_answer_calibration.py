"""Calibration beside numpy's histograms and simulated models whose confidence is right, or wrong by a known amount."""

import numpy as np
import pytest

from napkin.evaluation.calibration import brier_score, calibration_of, choice_probabilities


def test_briers_score_is_the_squared_distance() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        logprobs = draw.normal(-50, 3, size=4).tolist()
        p = choice_probabilities(logprobs)
        assert p.tolist() == pytest.approx((np.exp(logprobs) / np.exp(logprobs).sum()).tolist())
        for right in range(4):
            assert brier_score(p, right) == pytest.approx(float(((p - np.eye(4)[right]) ** 2).sum()))


def test_the_error_is_the_weighted_gap_of_the_bins() -> None:
    draw = np.random.default_rng(1)
    confidence = draw.uniform(0.2, 1.0, size=500)
    right = draw.random(500) < confidence**2
    found = calibration_of(confidence.tolist(), right.tolist(), n_bins=10)
    total = 0.0
    for low in np.arange(10) / 10:
        inside = (confidence > low) & (confidence <= low + 0.1)
        if inside.any():
            total += inside.sum() / 500 * abs(right[inside].mean() - confidence[inside].mean())
    assert found.error == pytest.approx(total, abs=1e-12)
    assert sum(each.items for each in found.bins) == 500
    assert found.overconfidence == pytest.approx(confidence.mean() - right.mean())


def test_a_calibrated_model_has_the_error_that_chance_gives() -> None:
    errors, chances = [], []
    for seed in range(30):
        draw = np.random.default_rng(seed)
        confidence = draw.uniform(0.25, 1.0, size=300)
        found = calibration_of(confidence.tolist(), (draw.random(300) < confidence).tolist())
        errors.append(found.error)
        chances.append(found.chance)
    # Far above 0, and equal to what it is by chance.
    assert np.mean(errors) > 0.03
    assert np.mean(errors) == pytest.approx(np.mean(chances), abs=4 * np.std(errors) / 30**0.5)
    wrong = calibration_of([0.9] * 400, [True, False] * 200)
    assert (wrong.error, wrong.overconfidence) == (pytest.approx(0.4), pytest.approx(0.4))
    # All items are in one bin: the error varies as the accuracy does.
    assert wrong.standard_error == pytest.approx((0.25 / 400) ** 0.5, rel=0.15)
