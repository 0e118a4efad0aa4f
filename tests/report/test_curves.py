import numpy as np
import pytest

from napkin.report.overfitting import smooth, smoothing_width, thin


def test_thinning_keeps_the_ends_the_highest_and_the_lowest_within_the_limit():
    generator = np.random.default_rng(7)
    x, y = np.arange(100_000.0), generator.normal(size=100_000)
    y[51_234], y[77_777] = 40.0, -40.0
    kept = thin([y], 1000)
    thin_x, thin_y = x[kept], y[kept]
    assert 900 < len(thin_x) <= 1000
    assert (thin_x[0], thin_x[-1]) == (0, 99_999)
    assert {(51_234, 40.0), (77_777, -40.0)} <= set(zip(thin_x.tolist(), thin_y.tolist(), strict=True))
    assert np.all(np.diff(thin_x) > 0)
    assert np.array_equal(y[thin_x.astype(int)], thin_y)


def test_a_short_curve_is_left_as_it_is():
    x, y = np.arange(10.0), np.arange(10.0) ** 2
    kept = thin([y, -y], 10)
    assert np.array_equal(x[kept], x)
    assert np.array_equal(y[kept], y)


def test_thinning_keeps_a_gap_and_sees_past_single_missing_values():
    y = np.ones(1000)
    y[400:600] = np.nan
    y[::7] = np.nan
    thin_y = y[thin([y], 100)]
    middle = thin_y[np.flatnonzero(np.isnan(thin_y))]
    assert 8 <= len(middle) <= 12
    assert np.nanmin(thin_y) == np.nanmax(thin_y) == 1


def test_curves_that_are_thinned_together_keep_the_peaks_of_each():
    generator = np.random.default_rng(11)
    curves = [generator.normal(size=50_000) for _ in range(4)]
    sparse = np.full(50_000, np.nan)
    sparse[1000::1000] = generator.normal(size=49)
    for index, curve in enumerate(curves):
        curve[10_001 * (index + 1)] = 30.0
    kept = set(thin([*curves, sparse], 2000).tolist())
    assert len(kept) <= 2000
    assert {10_001, 20_002, 30_003, 40_004} <= kept
    assert set(range(1000, 50_000, 1000)) <= kept


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (49, 1), (50, 3), (4000, 161)])
def test_the_smoothing_is_a_twenty_fifth_of_the_run_and_odd(steps, width):
    assert smoothing_width(steps) == width


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
