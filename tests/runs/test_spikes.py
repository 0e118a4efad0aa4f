import random

import numpy as np
import pytest

from napkin.runs.metrics import FEWEST, THRESHOLD, WINDOW, remember, spike


def test_a_spike_is_what_numpy_finds_by_the_definition() -> None:
    draw = random.Random(0)
    recent: list[float] = []
    marked = 0
    for step in range(3000):
        loss = 3 * 0.999**step + draw.gauss(0, 0.02) + (draw.random() < 0.01) * draw.uniform(0, 0.5)
        window = np.array(recent[-WINDOW:])
        expected = None
        if len(window) >= FEWEST:
            deviation = 1.4826 * np.median(np.abs(window - np.median(window)))
            score = (loss - np.median(window)) / max(deviation, 0.005 * np.median(window), 1e-12)
            expected = score if score > THRESHOLD else None
        found = spike(loss, recent)
        assert found == (None if expected is None else pytest.approx(float(expected)))
        marked += found is not None
        remember(loss, recent)
    assert 5 < marked < 40
    assert len(recent) == WINDOW


def test_noise_and_a_falling_loss_are_no_spikes() -> None:
    draw = random.Random(1)
    recent: list[float] = []
    for step in range(20_000):
        loss = 2 + 8 * 0.99**step + draw.gauss(0, 0.05)
        assert spike(loss, recent) is None
        remember(loss, recent)


def test_a_new_level_is_a_spike_until_it_is_the_usual_one() -> None:
    recent = [1.0] * WINDOW
    marks = []
    for _ in range(WINDOW):
        marks.append(spike(2.0, recent) is not None)
        remember(2.0, recent)
    assert marks[0]
    assert not marks[-1]


def test_losses_without_any_scatter_forgive_half_a_percent_a_deviation() -> None:
    assert spike(1.029, [1.0] * WINDOW) is None
    assert spike(1.031, [1.0] * WINDOW) is not None
    assert spike(1e-9, [0.0] * WINDOW) is not None
