"""The Triton kernels of attention in Triton's interpreter, against attention spelled out in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.kernels.attention.flash import flash_attention
from oracles.masked_attention import CASES, attention_by_hand, gradients, problem


def compare(case: dict[str, Any], dtype: torch.dtype, bound: float) -> None:
    inputs, upstream, settings = problem(**case, dtype=dtype)
    expected = attention_by_hand(inputs, settings)
    actual = flash_attention(*inputs, **settings)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)
    for mine, theirs in zip(gradients(actual, inputs, upstream), gradients(expected, inputs, upstream), strict=True):
        assert (mine.double() - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_give_result_and_gradients_in_fp32(case: dict[str, Any]) -> None:
    compare(case, torch.float32, 1e-5)


@pytest.mark.parametrize("case", CASES[2:4], ids=str)
def test_kernels_give_result_and_gradients_in_fp16(case: dict[str, Any]) -> None:
    compare(case, torch.float16, 4e-3)


def test_scores_a_thousand_times_as_large_stay_finite() -> None:
    # Scores of thousands have an absolute error of 1e-4 in fp32, and so have their exponentials.
    compare({"head_dim": 32, "n_queries": 70, "n_keys": 70, "scale": 1000.0}, torch.float32, 2e-3)


def test_bf16_in_the_interpreter_is_refused() -> None:
    query = torch.zeros(1, 1, 16, 32, dtype=torch.bfloat16)
    with pytest.raises(NapkinError, match="multiplies bf16 matrices wrongly"):
        flash_attention(query, query, query)


class Adapter(torch.autograd.Function):
    """FlashAttention as courses ask for it: apply(q, k, v, is_causal) on [batch, position, head_dim], L is saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        from napkin.kernels.attention.triton_flash import attend

        settings: tuple[Any, ...] = (None, q.shape[-1] ** -0.5, 0.0, 0, is_causal, 0)
        heads: Any = [each[:, None] for each in (q, k, v)]
        mixed, logsumexp = attend(*heads, *settings)
        ctx.settings = settings[1:]
        ctx.save_for_backward(q, k, v, mixed[:, 0], logsumexp[:, 0])
        return mixed[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from napkin.kernels.attention.triton_flash import attend_backward

        q, k, v, mixed, logsumexp = (each[:, None] for each in ctx.saved_tensors)
        grads = attend_backward(gradients[0][:, None], q, k, v, None, mixed, logsumexp, *ctx.settings)
        return *(each[:, 0] for each in grads), None


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_autograd_function_of_the_kernels_saves_one_logsumexp_per_query(is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3))
    mixed = Adapter.apply(q, k, v, is_causal)
    assert isinstance(mixed, Tensor)
    saved = [each for each in mixed.grad_fn.saved_tensors if each.shape == (2, 128)]  # pyright: ignore
    scores = q @ k.mT / 8
    if is_causal:
        scores = scores.masked_fill(torch.ones(128, 128, dtype=torch.bool).triu(1), -torch.inf)
    assert len(saved) == 1
    torch.testing.assert_close(saved[0], scores.logsumexp(dim=-1), rtol=1e-5, atol=1e-5)
    expected = scores.softmax(dim=-1) @ v
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(4))
    for mine, theirs in zip(
        gradients(mixed, (q, k, v), upstream), gradients(expected, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
