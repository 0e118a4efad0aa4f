import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.data import SEPARATOR, Batches, Document, TokenFile, TokenMixture, write_token_file
from napkin.data.mixing import PhasedInterleaving, shares_within, temperature_weights
from napkin.errors import NapkinError
from napkin.tokenizer import ByteTokenizer

PHASES = [(0, [3.0, 1.0, 0.0]), (100, [0.0, 1.0, 5.0]), (101, [1.0, 0.0, 0.0]), (700, [1.0, 1.0, 1.0])]


def test_a_phase_goes_on_where_the_one_before_left_each_source() -> None:
    whole = PhasedInterleaving(PHASES)(0, 1000)
    sources = np.full(1000, -1)
    for source, (before, places) in enumerate(whole):
        assert before == 0
        assert (sources[places] == -1).all()
        sources[places] = source
    for (begin, weights), (end, _) in pairwise([*PHASES, (1000, [])]):
        counts = np.bincount(sources[begin:end], minlength=3)
        shares = np.array(weights) / sum(weights)
        assert abs(counts - shares * (end - begin)).max() <= 1.68
        assert not counts[shares == 0].any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 900), st.integers(0, 300))
def test_any_stretch_of_phases_is_what_the_whole_says_of_it(start: int, length: int) -> None:
    interleaving = PhasedInterleaving(PHASES)
    whole = interleaving(0, start + length)
    for (before, places), (_, all_places) in zip(interleaving(start, length), whole, strict=True):
        assert before == (all_places < start).sum()
        assert places.tolist() == (all_places[all_places >= start] - start).tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 1000)), min_size=1, max_size=6), st.floats(1, 3000))
def test_shares_fill_what_fits_and_keep_the_proportions_of_the_rest(
    files: list[tuple[float, float]], amount: float
) -> None:
    weights, capacities = [list(column) for column in zip(*files, strict=True)]
    shares = shares_within(weights, amount, capacities)
    if shares is None:
        assert sum(capacities) <= amount * (1 + 1e-6)
        return
    assert math.isclose(sum(shares), amount, rel_tol=1e-6)
    rates = [share / weight for share, weight in zip(shares, weights, strict=True)]
    for share, capacity, rate in zip(shares, capacities, rates, strict=True):
        assert share <= capacity * (1 + 1e-9)
        # A file below its capacity is read at the highest rate of all.
        assert share >= capacity * (1 - 1e-9) or math.isclose(rate, max(rates), rel_tol=1e-6)


@pytest.mark.parametrize(("temperature", "ratio"), [(1.0, 100.0), (2.0, 10.0), (math.inf, 1.0)])
def test_a_temperature_takes_a_root_of_the_lengths(temperature: float, ratio: float) -> None:
    long, short = temperature_weights([10_000, 100], temperature)
    assert math.isclose(long / short, ratio)


def test_a_curriculum_changes_the_batches_from_its_step_on(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer([SEPARATOR])
    files: list[TokenFile] = [
        write_token_file(tmp_path / f"{letter}.tokens", [Document(letter, letter * 399)], tokenizer) for letter in "ab"
    ]

    def batches(later: list[tuple[int, tuple[float, ...]]]) -> Batches:
        return Batches(TokenMixture(files, (3, 1), later), context_length=8, batch_size=4, seed=0)

    plain, changing = batches([]), batches([(5, (0, 1))])
    for step in range(5):
        assert plain[step][0].equal(changing[step][0])
    assert {int(token) for token in changing[5][0][:, -1]} == {ord("b")}
    assert changing.epochs_of_files(10) == [15 / 50, (5 + 20) / 50]


@pytest.mark.parametrize("phases", [[(1, [1.0])], [(0, [1.0]), (0, [1.0])], [(0, [0.0])], [(0, [-1.0, 1.0])]])
def test_impossible_phases_are_refused(phases: list[tuple[int, list[float]]]) -> None:
    with pytest.raises(NapkinError, match="not possible"):
        PhasedInterleaving(phases)
