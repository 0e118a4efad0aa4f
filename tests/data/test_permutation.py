import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.data import KeyedPermutation
from napkin.errors import NapkinError

MASK = 2**64 - 1


def reference(n: int, key: int, index: int) -> int:
    """The same permutation with Python's integers, one element at a time."""

    def mixed(z: int) -> int:
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        return z ^ z >> 31

    base = 1
    while base * base < n:
        base += 1
    round_keys = [mixed((key + i * 0x9E3779B97F4A7C15) & MASK) for i in range(1, 7)]
    while True:
        left, right = divmod(index, base)
        for round_key in round_keys:
            left, right = right, (left + mixed((right + round_key) & MASK) % base) % base
        index = left * base + right
        if index < n:
            return index


def test_it_is_a_bijection_for_every_small_n() -> None:
    for n in range(1, 400):
        places = KeyedPermutation(n, key=n * 31)(np.arange(n))
        assert sorted(places.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [1023, 1024, 1025, 99_999, 2**16, 2**16 + 1, 1_000_003])
def test_it_is_a_bijection_for_larger_n(n: int) -> None:
    places = KeyedPermutation(n, key=7)(np.arange(n))
    assert np.array_equal(np.sort(places), np.arange(n))


@given(st.integers(1, 5000), st.integers(0, MASK), st.data())
def test_it_equals_the_reference_in_plain_integers(n: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, n - 1))
    assert KeyedPermutation(n, key)(np.array([index])).tolist() == [reference(n, key, index)]


def test_it_reaches_all_of_a_range_of_2_to_the_40_without_collisions() -> None:
    n = 2**40
    indices = np.unique(np.random.default_rng(0).integers(0, n, 100_000))
    places = KeyedPermutation(n, key=3)(indices)
    assert len(np.unique(places)) == len(indices)
    assert 0 <= places.min() < n * 0.001
    assert n * 0.999 < places.max() < n
    # Sixteen equal bins of random places: 15 degrees of freedom, 60 is beyond one in a million.
    observed = np.bincount(places >> 36, minlength=16)
    assert chi_square(observed, len(indices) / 16) < 60


def test_the_known_values_are_kept() -> None:
    assert KeyedPermutation(5, key=1)(np.arange(5)).tolist() == [3, 2, 0, 4, 1]
    places = KeyedPermutation(2**40, key=1)(np.arange(2**40 - 3, 2**40))
    assert places.tolist() == [463954788374, 237995224704, 824854509088]


def test_the_shape_of_the_indices_is_kept_and_they_are_not_changed() -> None:
    indices = np.arange(12, dtype=np.int32).reshape(3, 4)
    places = KeyedPermutation(12, key=0)(indices)
    assert places.shape == (3, 4)
    assert places.dtype == np.int64
    assert np.array_equal(indices.ravel(), np.arange(12))
    assert KeyedPermutation(12, key=0)(np.array([], np.int64)).shape == (0,)


def test_neighbouring_keys_give_unlike_permutations() -> None:
    n = 1000
    orders = [KeyedPermutation(n, key)(np.arange(n)) for key in range(20)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Two random permutations agree in one place on average (Poisson).
            assert np.count_nonzero(one == other) < 12
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.2


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("n", [8, 10, 17, 40])
def test_over_all_keys_each_index_goes_everywhere_equally_often(n: int) -> None:
    n_keys = 2000
    observed = np.zeros((n, n))
    for key in range(n_keys):
        observed[np.arange(n), KeyedPermutation(n, key)(np.arange(n))] += 1
    freedom = (n - 1) ** 2
    assert chi_square(observed, n_keys / n) < freedom + 6 * (2 * freedom) ** 0.5


def test_the_distance_between_neighbours_is_uniform() -> None:
    n, n_keys = 11, 3000
    distances = Counter[int]()
    for key in range(n_keys):
        first, second = KeyedPermutation(n, key)(np.array([0, 1])).tolist()
        distances[(second - first) % n] += 1
    observed = np.array([distances[d] for d in range(1, n)])
    assert observed.sum() == n_keys
    # 9 degrees of freedom: 45 is beyond one in a million.
    assert chi_square(observed, n_keys / (n - 1)) < 45


@pytest.mark.parametrize("index", [-1, 10, 2**40])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        KeyedPermutation(10, key=0)(np.array([0, index]))


@pytest.mark.parametrize(("n", "key"), [(0, 0), (-1, 0), (2**63, 0), (5, -1), (5, 2**64)])
def test_an_impossible_size_or_key_is_refused(n: int, key: int) -> None:
    with pytest.raises(NapkinError):
        KeyedPermutation(n, key)


def test_it_needs_no_torch() -> None:
    script = "import sys, napkin.data.permutation, napkin.data.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=os.environ, check=False).returncode == 0


def chi_square(observed: np.ndarray, expected: float) -> float:
    return float(((observed - expected) ** 2 / expected).sum())
