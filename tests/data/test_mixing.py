import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.data.mixing import MAX_DEVIATION, Interleaving
from napkin.errors import NapkinError

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


def sources_of(interleaving: Interleaving, start: int, length: int) -> list[int]:
    """The source of each element; each must have one."""
    sources = [-1] * length
    for source, (_, places) in enumerate(interleaving(start, length)):
        for place in places:
            assert sources[place] == -1
            sources[place] = source
    assert -1 not in sources
    return sources


@settings(max_examples=30, deadline=None)
@given(WEIGHTS)
def test_each_source_keeps_to_its_share_after_any_number_of_elements(weights: list[float]) -> None:
    counts = np.eye(len(weights))[sources_of(Interleaving(weights), 0, 500)].cumsum(axis=0)
    shares = np.array(weights) / math.fsum(weights)
    farthest = abs(counts - np.outer(np.arange(1, 501), shares)).max()
    assert farthest <= (0.5 if len(weights) <= 2 else MAX_DEVIATION) + 1e-6


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.integers(0, 10**13), st.integers(0, 60), st.integers(1, 60))
def test_any_stretch_is_what_the_whole_says_of_it(weights: list[float], start: int, length: int, cut: int) -> None:
    interleaving = Interleaving(weights)
    whole = interleaving(start, length + cut)
    head, tail = interleaving(start, length), interleaving(start + length, cut)
    for (before, places), (first, early), (later, late) in zip(whole, head, tail, strict=True):
        assert first == before
        assert later == before + len(early)
        assert places.tolist() == [*early.tolist(), *(late + length).tolist()]
    assert sum(before for before, _ in whole) == start


def test_a_trillion_elements_later_the_shares_still_hold() -> None:
    weights = [0.5, 0.3, 0.15, 0.05]
    for (before, _), weight in zip(Interleaving(weights)(10**12, 1), weights, strict=True):
        assert abs(before - 10**12 * weight) < 4


def test_a_long_stretch_is_made_of_short_ones() -> None:
    length = 2**20 + 5
    whole = Interleaving([2, 1, 1])(7, length)
    assert sum(len(places) for _, places in whole) == length
    last = Interleaving([2, 1, 1])(7 + 2**20, 5)
    for (_, places), (_, end) in zip(whole, last, strict=True):
        assert places[places >= 2**20].tolist() == (end + 2**20).tolist()


def test_elements_far_out_are_counted_without_overflow() -> None:
    mixed = Interleaving([3, 1])(10**30, 8)
    assert sum(before for before, _ in mixed) == 10**30
    assert [len(places) for _, places in mixed] == [6, 2]


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_weights_that_are_no_shares_are_refused(weight: float) -> None:
    with pytest.raises(NapkinError, match="use a number above 0"):
        Interleaving([1.0, weight])
