"""The first step beyond memory is found by few counts: beside a count of all steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.planning.step.longest_step import find_longest, largest_that

SIZES = st.lists(st.tuples(*[st.integers(0, 40)] * 3), min_size=1, max_size=40)


@given(SIZES, st.tuples(*[st.integers(1, 5)] * 3), st.floats(0.0, 1.1), st.integers(0, 100))
def test_worst_and_first_are_those_of_a_count_of_all(
    sizes: list[tuple[int, ...]], weights: tuple[int, ...], share: float, fixed: int
) -> None:
    # Steps of these sizes alone have few maxima, so that none is left uncounted.
    sizes = [(each[0], each[0] * each[1], each[0] * each[1]) for each in sizes]
    peaks = [1 + fixed + int(np.dot(each, weights)) for each in sizes]
    limit = int(share * max(peaks))
    counted: list[int] = []

    def peak_of(place: int) -> int:
        counted.append(place)
        return peaks[place]

    told = find_longest(sizes, peak_of, lambda place: str(sizes[place]), step_bytes=limit)
    first = next((place for place, peak in enumerate(peaks) if peak > limit), None)
    assert told.fits == (first is None) == (told.first_beyond is None)
    assert len(counted) == len({sizes[place] for place in counted})
    if told.first_beyond is not None and first is not None:
        assert told.first_beyond.number == first + 1


def test_a_long_run_needs_few_counts() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(10, 500, 10_000)
    lengths[7000] = 900
    sizes = [(8 * int(n), 8 * int(n) ** 2) for n in lengths]
    counted: list[int] = []

    def peak_of(place: int) -> int:
        counted.append(place)
        return 1000 + 3 * sizes[place][0] + sizes[place][1]

    told = find_longest(sizes, peak_of, lambda place: "", step_bytes=1000 + 3 * 8 * 600 + 8 * 600**2)
    assert told.number == 7001
    assert told.first_beyond is not None
    assert told.first_beyond.number == 7001
    assert len(counted) < 20


def test_what_is_known_bounds_all_others() -> None:
    def refuse(place: int) -> int:
        raise AssertionError(place)

    told = find_longest([(2, 4), (4, 16), (3, 9)], refuse, str, step_bytes=1000, known={0: 100})
    assert (told.number, told.peak_bytes, told.is_counted) == (2, 400, False)
    assert "at most 400 B" in told.sentence()


@pytest.mark.parametrize("limit", [0, 5, 63, 64, 99, 500])
def test_the_largest_that_fits(limit: int) -> None:
    assert largest_that(lambda n: n <= limit, 5, 100) == (0 if limit < 5 else min(limit, 99))
