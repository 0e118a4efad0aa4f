"""The compiled loops that draw, held to a full sort of each row in NumPy with sums in extended precision."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from napkin.inference.sampling import uniform
from napkin.kernels.sampling.draws import drawn_rows, row_probabilities

SIZES = (1, 2, 48, 49, 300, 5000)
LAST_UNIFORM = 1 - 2.0**-53


def rows_of(size: int) -> dict[str, np.ndarray]:
    """Rows of every kind: likely and unlikely tokens, ties, outliers at both ends of the range, signed zeros."""
    random = np.random.default_rng(size)
    z = random.standard_normal(size)
    outliers, clusters = 0.1 * z, 0.1 * z
    outliers[random.random(size) < 0.1] = -3.4e38
    # Logits whose distances from each other span the range of float32: each look at a bucket splits off a few.
    clusters += -np.exp2(random.integers(-120, 120, size)) * (random.random(size) < 0.5)
    return {
        "peaked": 9 * z,
        "middling": 2.5 * z,
        "flat": 1e-3 * z,
        "tied": np.round(3 * z) / 2,
        "equal": np.full(size, -7.25),
        "zeros": np.where(z > 0, 0.0, -0.0),
        "outliers": outliers,
        "clusters": clusters,
        "largest": np.where(z > 1, 3.4e38, z),
    }


def sorted_row(z: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The tokens in the order of falling logits, equal ones by their ids, and their weights."""
    order = np.lexsort((np.arange(len(z)), -z))
    with np.errstate(over="ignore"):
        return order, np.exp((z[order].astype(np.float64) - np.float64(z.max())) / temperature).astype(np.longdouble)


@pytest.mark.parametrize("size", SIZES)
def test_kept_tokens_are_those_of_a_full_sort(size: int) -> None:
    for (name, row), temperature, top_k, top_p, min_p in product(
        rows_of(size).items(), (0.8, 30.0), (math.inf, 1, 50), (1.0, 0.95, 0.5, 1e-320, 1 - 2.0**-53), (0.0, 0.3)
    ):
        z = row.astype(np.float32)
        settings = torch.tensor([[temperature, top_k, top_p, min_p, 0.0]], dtype=torch.float64)
        found, is_finite = row_probabilities(torch.from_numpy(z)[None], settings)
        assert is_finite
        p = found[0].numpy()
        order, weights = sorted_row(z, temperature)
        weights[int(min(top_k, size)) :] = 0
        sums = np.concatenate(([0], np.cumsum(weights)))
        kept = int(np.count_nonzero(p))
        case = (name, temperature, top_k, top_p, min_p)
        assert set(np.flatnonzero(p)) == set(order[:kept]), case
        # The last kept one is needed, and the next one is not: but for the rounding of a sum of float64.
        limit, slack = top_p * sums[-1], 1e-12 * sums[-1]
        assert kept >= 1
        assert kept == 1 or (sums[kept - 1] < limit + slack and weights[kept - 1] >= min_p), case
        enough = kept == size or weights[kept] <= 1e-300 or weights[kept] < min_p
        assert enough or sums[kept] >= limit - slack, case
        np.testing.assert_allclose(p[order[:kept]], (weights[:kept] / sums[kept]).astype(float), rtol=1e-12)


def test_a_uniform_number_draws_the_first_token_whose_sum_exceeds_it() -> None:
    size = 3000
    uniforms = [0.0, LAST_UNIFORM, *(uniform(5, number) for number in range(200))]
    for name, row in rows_of(size).items():
        z = torch.from_numpy(row.astype(np.float32)).expand(len(uniforms), -1).contiguous()
        settings = torch.tensor([[0.9, math.inf, 0.9, 0.0, u] for u in uniforms], dtype=torch.float64)
        tokens, logprobs = drawn_rows(z, settings)
        p = row_probabilities(z[:1], settings[:1])[0][0].numpy()
        sums = np.cumsum(p.astype(np.longdouble))
        for u, token, logprob in zip(uniforms, tokens.tolist(), logprobs.tolist(), strict=True):
            assert p[token] > 0, name
            assert sums[token] > u * sums[-1] - 1e-13, name
            assert sums[token] - p[token] <= u * sums[-1] + 1e-13, name
            assert logprob == pytest.approx(math.log(p[token]), abs=1e-12)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, math.inf, 1.0), (0.7, math.inf, 0.9), (1.5, 40, 0.8)]
)
def test_tokens_are_drawn_as_often_as_their_probabilities_say(temperature: float, top_k: float, top_p: float) -> None:
    """Pearson's chi-square over all tokens that are expected often enough, the others together."""
    z, n = torch.from_numpy(rows_of(300)["middling"].astype(np.float32)), 20_000
    settings = torch.tensor(
        [[temperature, top_k, top_p, 0.0, uniform(3, number)] for number in range(n)], dtype=torch.float64
    )
    tokens, _ = drawn_rows(z.expand(n, -1).contiguous(), settings)
    expected = n * row_probabilities(z[None], settings[:1])[0][0]
    counts = torch.bincount(tokens, minlength=len(z)).double()
    often = expected >= 10
    assert not counts[expected == 0].any()
    groups = [(counts[often], expected[often]), (counts[~often].sum()[None], expected[~often].sum()[None])]
    statistic = sum(((seen - wanted) ** 2 / wanted.clamp(min=1)).sum().item() for seen, wanted in groups)
    freedom = int(often.sum())
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_draws_nothing_and_others_do(value: float) -> None:
    for place in (0, 777, 999):
        z = torch.zeros(3, 1000)
        z[1, place] = value
        for top_k, top_p in product((math.inf, 1, 3), (1.0, 0.9)):
            settings = torch.tensor([[1.0, top_k, top_p, 0.0, 0.5]] * 3, dtype=torch.float64)
            tokens, _ = drawn_rows(z, settings)
            assert (tokens >= 0).tolist() == [True, False, True]
            assert not row_probabilities(z, settings)[1]


def test_the_likeliest_token_is_the_first_of_the_largest() -> None:
    settings = torch.tensor([[1.0, 1.0, 1.0, 0.0, LAST_UNIFORM]], dtype=torch.float64)
    for size in SIZES:
        for row in rows_of(size).values():
            z = row.astype(np.float32)
            tokens, logprobs = drawn_rows(torch.from_numpy(z)[None], settings)
            assert tokens.item() == int(z.argmax())
            assert logprobs.item() == 0
