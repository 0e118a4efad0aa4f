import numpy as np
import pytest
import torch
from torch import Tensor

from napkin.kernels.attention import attention_reference, plain_attention, softcap
from oracles import numpy_transformer as oracle


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def double(tensor: Tensor) -> oracle.Array:
    return tensor.detach().double().numpy()


def assert_equals_float64(actual: Tensor, expected: oracle.Array) -> None:
    np.testing.assert_allclose(double(actual), expected, rtol=1e-5, atol=1e-5)


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
