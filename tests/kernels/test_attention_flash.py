"""FlashAttention-2 in blocks of torch against attention spelled out in fp64, and what a count says of it."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.operators import work_of
from napkin.errors import NapkinError
from napkin.kernels.attention.flash import (
    backward_reference,
    document_bounds,
    flash_attention,
    flash_attention_with_logsumexp,
    forward_reference,
)
from oracles.masked_attention import CASES, attention_by_hand, gradients, problem, visible


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_blocks_give_result_and_gradients_of_attention_spelled_out(case: dict[str, Any], dtype: torch.dtype) -> None:
    inputs, upstream, settings = problem(**case, dtype=dtype)
    expected = attention_by_hand(inputs, settings)
    actual = flash_attention(*inputs, **settings)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)
    for mine, theirs in zip(gradients(actual, inputs, upstream), gradients(expected, inputs, upstream), strict=True):
        assert (mine.double() - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.thorough
def test_gradcheck_in_fp64() -> None:
    inputs, _, settings = problem(head_dim=5, n_queries=9, n_keys=11, window=4, softcap=1.5, documents=True)
    assert torch.autograd.gradcheck(lambda *inputs: flash_attention(*inputs, **settings), inputs, atol=1e-6)


class Adapter(torch.autograd.Function):
    """FlashAttention as courses ask for it: apply(q, k, v, is_causal) on [batch, position, head_dim], L is saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        heads: Any = [each[:, None] for each in (q, k, v)]
        settings: tuple[Any, ...] = (None, q.shape[-1] ** -0.5, 0.0, 0, is_causal, 0)
        mixed, logsumexp = forward_reference(*heads, *settings)
        ctx.settings = settings[1:]
        ctx.save_for_backward(q, k, v, mixed[:, 0], logsumexp[:, 0])
        return mixed[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, mixed, logsumexp = (each[:, None] for each in ctx.saved_tensors)
        grads = backward_reference(gradients[0][:, None], q, k, v, None, mixed, logsumexp, *ctx.settings)
        return *(each[:, 0] for each in grads), None


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_autograd_function_of_the_reference_saves_one_logsumexp_per_query(is_causal: bool) -> None:
    q, k, v = (torch.randn(4, 128, 64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3))
    mixed = Adapter.apply(q, k, v, is_causal)
    assert isinstance(mixed, Tensor)
    saved = [each for each in mixed.grad_fn.saved_tensors if each.shape == (4, 128)]  # pyright: ignore
    scores = q @ k.mT / 8
    if is_causal:
        scores = scores.masked_fill(torch.ones(128, 128, dtype=torch.bool).triu(1), -torch.inf)
    assert len(saved) == 1
    torch.testing.assert_close(saved[0], scores.logsumexp(dim=-1), rtol=1e-5, atol=1e-5)
    expected = scores.softmax(dim=-1) @ v
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(4, 128, 64, generator=torch.Generator().manual_seed(4))
    for mine, theirs in zip(
        gradients(mixed, (q, k, v), upstream), gradients(expected, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_documents_are_runs_of_equal_ids() -> None:
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(3, (4, 40), generator=generator)
    starts, ends = document_bounds(documents).tolist()
    for row, ids in enumerate(documents.tolist()):
        runs = [len(list(run)) for _, run in itertools.groupby(ids)]
        places = [(sum(runs[:i]), sum(runs[: i + 1])) for i in range(len(runs))]
        expected = [place for place, length in zip(places, runs, strict=True) for _ in range(length)]
        assert list(zip(starts[row], ends[row], strict=True)) == expected


@pytest.mark.parametrize(("window", "offset"), [(0, 0), (0, 5), (1, 0), (4, 0), (4, 2), (30, 3)])
def test_counted_causal_flops_are_those_of_the_pairs_that_are_seen(window: int, offset: int) -> None:
    n_queries, n_keys, head_dim = 9, 14, 8
    settings = {"window": window or None, "query_offset": offset, "softcap": None, "is_causal": True, "bounds": None}
    pairs = int(visible(n_queries, n_keys, settings).sum())
    operator = torch.ops.napkin.flash_attention.default
    with FakeTensorMode():
        query, key = torch.empty(2, 3, n_queries, head_dim), torch.empty(2, 3, n_keys, head_dim)
        arguments = (query, key, key, None, 1.0, 0.0, window, True, offset)
        work = work_of(operator, arguments, {}, operator(*arguments))
    assert work is not None
    assert work.causal_flops == 2 * 2 * 2 * 3 * head_dim * pairs
    assert work.flops == 2 * 2 * 2 * 3 * head_dim * n_queries * n_keys


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        (((1, 3, 4, 8), (1, 2, 4, 8)), {}, "the queries' heads a multiple"),
        (((1, 2, 4, 320), (1, 2, 4, 320)), {}, "heads of up to 256 numbers, not 320"),
        (((1, 2, 4, 8), (1, 2, 3, 8)), {}, "the first at position -1"),
        (((1, 2, 4, 8), (1, 2, 6, 8)), {"query_offset": 3}, "use a query_offset of 0 to 2"),
        (((1, 2, 4, 8), (1, 2, 4, 8)), {"is_causal": False, "window": 2}, "use is_causal=True"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], settings: dict[str, Any], message: str
) -> None:
    queries, keys = map(torch.zeros, shapes)
    with pytest.raises(NapkinError, match=message):
        flash_attention(queries, keys, keys, **settings)


def test_attention_over_parts_of_the_keys_is_joined_by_their_logsumexp() -> None:
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(2, 4, 70, 16, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 2, 150, 16, generator=generator, dtype=torch.float64)
    parts = [
        flash_attention_with_logsumexp(queries, keys[:, :, part], values[:, :, part], is_causal=False)
        for part in (slice(0, 40), slice(40, 150))
    ]
    sums = torch.stack([logsumexp for _, logsumexp in parts])
    scores = queries @ keys.repeat_interleave(2, dim=1).mT / 4
    torch.testing.assert_close(sums.logsumexp(0), scores.logsumexp(-1))
    joined = (sums.softmax(0)[..., None] * torch.stack([mixed for mixed, _ in parts])).sum(0)
    torch.testing.assert_close(joined, scores.softmax(-1) @ values.repeat_interleave(2, dim=1))
