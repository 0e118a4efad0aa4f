import operator
from collections.abc import Callable
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.kernels.attention.reference import (
    attention_reference,
    fused_attention,
    plain_attention,
    softcap,
    softcapped_attention,
    softmax,
)
from oracles import numpy_transformer as oracle


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def double(tensor: Tensor) -> oracle.Array:
    return tensor.detach().double().numpy()


def assert_equals_float64(actual: Tensor, expected: oracle.Array) -> None:
    np.testing.assert_allclose(double(actual), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 3e4, -3e4])
def test_softmax_has_the_exact_numbers_and_their_gradient(dtype: torch.dtype, shift: float) -> None:
    x = (8 * normal(5, 7, 3)).to(dtype).add(shift).requires_grad_()
    with torch.no_grad():
        x[2, 4, 1] = -torch.inf
    upstream = normal(5, 7, 3, seed=1).to(dtype)
    weights = softmax(x, dim=1)
    (gradient,) = torch.autograd.grad(weights, x, upstream)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    for row in range(5):
        for column in range(3):
            numbers = [Decimal(each) for each in x[row, :, column].tolist()]
            exponentials = [each.exp() for each in numbers]
            exact = [each / sum(exponentials) for each in exponentials]
            outer = list(map(Decimal, upstream[row, :, column].tolist()))
            mean = sum(map(operator.mul, exact, outer))
            slopes = [p * (g - mean) for p, g in zip(exact, outer, strict=True)]
            np.testing.assert_allclose(double(weights[row, :, column]), list(map(float, exact)), rtol=0, atol=tolerance)
            np.testing.assert_allclose(
                double(gradient[row, :, column]), list(map(float, slopes)), rtol=0, atol=4 * tolerance
            )


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_attention_equals_the_reference_and_numpy(n_kv_heads: int) -> None:
    queries, keys, values = normal(2, 4, 9, 8), normal(2, n_kv_heads, 9, 8, seed=1), normal(2, n_kv_heads, 9, 8)
    fused = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=n_kv_heads != 4
    )
    plain = attention_reference(queries, keys, values)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    for head in range(4):
        shared = head * n_kv_heads // 4
        expected = oracle.attention(double(queries[1, head]), double(keys[1, shared]), double(values[1, shared]))
        assert_equals_float64(plain[1, head], expected)


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_gradients_of_attention_equal_those_of_the_reference(n_kv_heads: int) -> None:
    queries, keys, values = inputs = [
        normal(2, heads, 9, 8, seed=seed).requires_grad_() for seed, heads in enumerate((4, n_kv_heads, n_kv_heads))
    ]
    fused = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=n_kv_heads != 4
    )
    upstream = normal(2, 4, 9, 8, seed=9)
    actual = torch.autograd.grad(fused, inputs, upstream)
    expected = torch.autograd.grad(attention_reference(queries, keys, values), inputs, upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_the_gradient_of_plain_attention_is_that_of_attention_spelled_out(n_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    heads = (4, n_kv_heads, n_kv_heads)
    inputs = [torch.randn(2, n, 16, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in heads]
    mask = torch.full((16, 16), float("-inf"), dtype=torch.float64).triu(1)
    gradient = torch.randn(2, 4, 16, 8, generator=generator, dtype=torch.float64)
    query, key, value = inputs
    ours = plain_attention(query, key, value, mask, 8**-0.5)
    found = torch.autograd.grad(ours, inputs, gradient)
    expected = torch.autograd.grad(attention_reference(*inputs), inputs, gradient)
    for mine, theirs in zip(found, expected, strict=True):
        # The reference computes in fp32.
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_capped_scores_never_pass_their_cap_and_small_ones_stay() -> None:
    scores = torch.tensor([-1e4, -0.01, 0.0, 0.01, 1e4])
    torch.testing.assert_close(softcap(scores, 50.0), torch.tensor([-50.0, -0.01, 0.0, 0.01, 50.0]))


@pytest.mark.parametrize("attend", [attention_reference, plain_attention, fused_attention])
@pytest.mark.parametrize("leading", [(), (4,), (2, 4), (3, 2, 4)], ids=len)
@pytest.mark.parametrize(("n_queries", "offset"), [(9, 0), (1, 8), (4, 5), (4, 0), (3, 2)])
def test_any_queries_of_a_sequence_attend_as_they_do_in_the_whole(
    attend: Callable[..., Tensor], leading: tuple[int, ...], n_queries: int, offset: int
) -> None:
    queries, keys, values = (normal(*leading, 9, 8, seed=seed).requires_grad_() for seed in range(3))
    whole = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    some = slice(offset, offset + n_queries)
    upstream = normal(*leading, n_queries, 8, seed=3)
    actual = attend(queries[..., some, :], keys, values, query_offset=offset)
    torch.testing.assert_close(actual, whole[..., some, :], rtol=1e-5, atol=1e-5)
    inputs = queries, keys, values
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(whole[..., some, :], inputs, upstream),
        rtol=1e-5,
        atol=1e-5,
    )
    if offset + n_queries == 9:
        assert torch.equal(attend(queries[..., some, :], keys, values), actual)


@pytest.mark.parametrize("attend", [plain_attention, partial(softcapped_attention, cap=3.0), fused_attention])
def test_shared_heads_and_wider_values_take_fewer_queries_than_keys(attend: Callable[..., Tensor]) -> None:
    queries, keys, values = normal(3, 2, 4, 5, 8), normal(3, 2, 2, 9, 8, seed=1), normal(3, 2, 2, 9, 6, seed=2)
    mask = normal(5, 9, seed=3)
    actual = attend(queries, keys, values, mask, 0.4)
    for head in range(4):
        alone = attend(queries[:, :, head], keys[:, :, head // 2], values[:, :, head // 2], mask, 0.4)
        torch.testing.assert_close(actual[:, :, head], alone, rtol=1e-5, atol=1e-5)
    assert actual.shape == (3, 2, 4, 5, 6)


def test_queries_and_keys_that_do_not_fit_are_refused_in_one_line() -> None:
    with pytest.raises(NapkinError, match=r"query.*keys"):
        plain_attention(normal(4, 8), normal(3, 8), normal(3, 8))
    with pytest.raises(NapkinError, match=r"\(3, 5, 8\).*keys.*shape \(2, 5, 8\)"):
        plain_attention(normal(3, 5, 8), normal(2, 5, 8), normal(2, 5, 8))
