"""Softmax attention: softmax(q · kᵀ · scale + mask) · v, in four implementations with the same numbers.

`attention_reference` is the specification. `plain_attention` is matrix products and a softmax: it holds all scores, and
its gradient is written out. `fused_attention` is torch's scaled_dot_product_attention and `flex_attention` torch's
compiled kernel: neither holds the scores.

Queries are [..., heads, query, head_dim], or [query, head_dim]. Keys and values may have fewer heads: query head h
reads key and value head h // (heads / kv_heads) (Ainslie et al. 2023). There may be more keys than queries, as with a
KV cache: the first query stands at position `query_offset` among the keys; None is n_keys - n_queries, at which the
last query sees all keys.
"""

import functools
from collections.abc import Callable
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from einops import repeat
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.errors import NapkinError
from napkin.kernels.operators import in_autocast_dtype
from napkin.torch_compile import set_up_compiler

Queries = Float[Tensor, "*batch_and_heads query head_dim"]
Keys = Float[Tensor, "*batch_and_kv_heads key head_dim"]
Values = Float[Tensor, "*batch_and_kv_heads key value_dim"]
Mixed = Float[Tensor, "*batch_and_heads query value_dim"]
Mask = Float[Tensor, "*#batch_and_heads query key"]


def softmax(x: Float[Tensor, "*shape"], dim: int = -1) -> Float[Tensor, "*shape"]:
    """exp(x) / sum(exp(x)) over a dimension, summed in fp32 or wider.

    The largest number of the dimension is subtracted first, so that no exponential overflows:

    >>> softmax(torch.tensor([1000.0, 1000.0, -torch.inf]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    exponentials = (wide - wide.detach().amax(dim, keepdim=True)).exp()
    return (exponentials / exponentials.sum(dim, keepdim=True)).to(x.dtype)


def attention_reference(queries: Queries, keys: Keys, values: Values, *, query_offset: int | None = None) -> Mixed:
    """Causal attention with scale 1/sqrt(head_dim), holding the scores of all pairs in fp32."""
    if queries.ndim > 2:
        group = queries.shape[-3] // keys.shape[-3]
        keys = repeat(keys, "... h t c -> ... (h group) t c", group=group)
        values = repeat(values, "... h t c -> ... (h group) t c", group=group)

    scores = queries.float() @ keys.float().transpose(-2, -1) / queries.shape[-1] ** 0.5
    weights = softmax(scores + causal_mask(queries, keys, query_offset))
    return (weights @ values.float()).to(queries.dtype)


def plain_attention(
    queries: Queries,
    keys: Keys,
    values: Values,
    mask: Mask | None = None,
    scale: float | None = None,
    *,
    query_offset: int | None = None,
) -> Mixed:
    """Attention as matrix products and a softmax; `mask` is added to the scores, None is causal.

    Scores and weights are in the queries' dtype or, under autocast, in autocast's; the softmax sums in fp32.

    Its backward pass is written out because autograd would keep more: scores that were masked in place, and gradients
    on their way through views. Kept here are queries, keys, values and the weights, which overwrite the scores.
    """
    queries, keys, values = in_autocast_dtype(queries, keys, values)
    mask = causal_mask(queries, keys, query_offset) if mask is None else mask
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    return _PlainAttention.apply(queries, keys, values, mask, scale)  # pyright: ignore[reportReturnType]


class _PlainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        # `plain_attention` has chosen the dtypes.
        with torch.autocast(queries.device.type, enabled=False):
            grouped = _grouped(queries * scale, keys)
            scores = (grouped @ keys.transpose(-2, -1)).view(*queries.shape[:-1], keys.shape[-2])
            scores = scores.add_(mask.to(queries.dtype))
            weights = torch.softmax(scores, dim=-1, out=scores).view(*grouped.shape[:-1], keys.shape[-2])
            ctx.save_for_backward(grouped, keys, values, weights)
            ctx.scale = scale
            return (weights @ values).view(*queries.shape[:-1], values.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grouped, keys, values, weights = ctx.saved_tensors
        gradient = grad_outputs[0].reshape(*grouped.shape[:-1], values.shape[-1])
        grad_values = weights.transpose(-2, -1) @ gradient
        grad_scores = gradient @ values.transpose(-2, -1)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_scores, weights, -1, weights.dtype)
        grad_queries = (grad_scores @ keys).mul_(ctx.scale).view(*grad_outputs[0].shape[:-1], keys.shape[-1])
        # The saved queries include the scale.
        grad_keys = grad_scores.transpose(-2, -1) @ grouped
        return grad_queries, grad_keys, grad_values, None, None


@no_type_check  # flex_attention compiles it into its kernel
def softcap(scores: Tensor, cap: float) -> Tensor:
    """cap · tanh(score / cap): scores approach ±cap and never exceed it (Gemma Team 2024)."""
    return cap * torch.tanh(scores / cap)


def softcapped_attention(
    queries: Queries,
    keys: Keys,
    values: Values,
    mask: Mask | None,
    scale: float,
    cap: float,
    *,
    query_offset: int | None = None,
) -> Mixed:
    """softmax(softcap(q · kᵀ · scale, cap) + mask) · v, causal if there is no mask; autograd differentiates it."""
    mask = causal_mask(queries, keys, query_offset) if mask is None else mask
    grouped = _grouped(queries * scale, keys)
    scores = softcap(grouped @ keys.transpose(-2, -1), cap).view(*queries.shape[:-1], keys.shape[-2])
    # In place: the scores are the largest tensors of a small model, and they are not needed without the mask.
    weights = scores.add_(mask.to(scores.dtype)).softmax(dim=-1)
    mixed = weights.view(*grouped.shape[:-1], keys.shape[-2]) @ values
    return mixed.view(*queries.shape[:-1], values.shape[-1])


def fused_attention(
    queries: Queries,
    keys: Keys,
    values: Values,
    mask: Mask | None = None,
    scale: float | None = None,
    *,
    query_offset: int | None = None,
) -> Mixed:
    """torch's scaled_dot_product_attention; causal if there is no mask."""
    n_queries, n_keys = queries.shape[-2], keys.shape[-2]
    offset = n_keys - n_queries if query_offset is None else query_offset
    if mask is None and offset and offset < n_keys - 1:
        # torch's own causal mask lets the first query see the first key alone.
        mask = causal_mask(queries, keys, offset)
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if mask is None else mask.to(queries.dtype),
        is_causal=mask is None and not offset,
        scale=scale,
        enable_gqa=queries.ndim > 2 and queries.shape[-3] != keys.shape[-3],
    )


def causal_mask(queries: Queries, keys: Keys, query_offset: int | None = None) -> Float[Tensor, "query key"]:
    """0 where query i, at position query_offset + i, sees a key, which is there or before, else -infinity.

    Raises NapkinError for an offset that would leave the first query without a key.
    """
    n_queries, n_keys = queries.shape[-2], keys.shape[-2]
    offset = n_keys - n_queries if query_offset is None else query_offset
    if offset < 0:
        raise NapkinError(
            f"{n_queries} queries, the first at position {offset}, and {n_keys} keys: a query before all keys sees "
            "none, use a query_offset of 0 or more"
        )
    positions = torch.arange(offset, offset + n_queries, device=queries.device)[:, None]
    later = torch.arange(n_keys, device=queries.device) > positions
    return torch.zeros(n_queries, n_keys, device=queries.device).masked_fill_(later, float("-inf"))


def _grouped(queries: Tensor, keys: Tensor) -> Tensor:
    """The queries that share a key as one matrix."""
    if queries.ndim == 2:
        return queries
    if queries.shape[:-3] != keys.shape[:-3] or queries.shape[-3] % keys.shape[-3]:
        raise NapkinError(
            f"queries of shape {tuple(queries.shape)} do not fit keys of shape {tuple(keys.shape)}: the dimensions "
            "before the heads have to be equal, and the queries' heads a multiple of the keys'"
        )
    return queries.reshape(*keys.shape[:-2], -1, queries.shape[-1])


def flex_attention(
    queries: Queries,
    keys: Keys,
    values: Values,
    score_mod: Callable[..., Tensor],
    block_mask: Any,
    scale: float,
    *,
    kernel: Callable[..., Tensor] | None = None,
) -> Mixed:
    """torch's flex_attention, compiled for a GPU: it skips blocks of pairs that `block_mask` hides entirely.

    `kernel` replaces the compiled kernel, as in tests on a CPU, where torch has no backward pass for it.
    """
    return (kernel or _compiled_flex_attention())(
        queries,
        keys,
        values,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


@functools.cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    set_up_compiler()
    return torch.compile(flex_attention, dynamic=False)
