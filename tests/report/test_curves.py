import numpy as np
import pytest

from napkin.report.curves import smooth, thin


def test_thinning_keeps_the_ends_the_highest_and_the_lowest_within_the_limit():
    generator = np.random.default_rng(7)
    x, y = np.arange(100_000.0), generator.normal(size=100_000)
    y[51_234], y[77_777] = 40.0, -40.0
    thin_x, thin_y = thin(x, y, 1000)
    assert 900 < len(thin_x) <= 1000
    assert (thin_x[0], thin_x[-1]) == (0, 99_999)
    assert {(51_234, 40.0), (77_777, -40.0)} <= set(zip(thin_x.tolist(), thin_y.tolist(), strict=True))
    assert np.all(np.diff(thin_x) > 0)
    assert np.array_equal(y[thin_x.astype(int)], thin_y)


def test_a_short_curve_is_left_as_it_is():
    x, y = np.arange(10.0), np.arange(10.0) ** 2
    thin_x, thin_y = thin(x, y, 10)
    assert np.array_equal(thin_x, x)
    assert np.array_equal(thin_y, y)


def test_thinning_keeps_a_gap_and_sees_past_single_missing_values():
    y = np.ones(1000)
    y[400:600] = np.nan
    y[::7] = np.nan
    _, thin_y = thin(np.arange(1000.0), y, 100)
    middle = thin_y[np.flatnonzero(np.isnan(thin_y))]
    assert 8 <= len(middle) <= 12
    assert np.nanmin(thin_y) == np.nanmax(thin_y) == 1


@pytest.mark.parametrize("width", [1, 2, 5, 9, 99])
def test_smoothing_equals_a_mean_taken_neighbour_by_neighbour(width):
    y = np.random.default_rng(3).normal(size=40)
    y[[4, 5, 20]] = np.nan
    smoothed = smooth(y, width)
    for index in range(40):
        reach = min(index, width // 2)
        near = y[index - reach : index + reach + 1]
        near = near[~np.isnan(near)]
        expected = near.mean() if len(near) else np.nan
        assert smoothed[index] == pytest.approx(expected, nan_ok=True)


def test_smoothing_leaves_a_straight_line_where_it_has_neighbours_on_both_sides():
    line = np.linspace(10, 2, 50)
    assert smooth(line, 11)[:45] == pytest.approx(line[:45])
