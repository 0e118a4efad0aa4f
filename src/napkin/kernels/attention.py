"""Softmax attention: softmax(q · kᵀ · scale + mask) · v, in four implementations with the same numbers.

`attention_reference` is the specification. `plain_attention` is matrix products and a softmax: it holds all scores, and
its gradient is written out. `fused_attention` is torch's scaled_dot_product_attention and `flex_attention` torch's
compiled kernel: neither holds the scores.

Queries are [batch, heads, position, head_dim]. Keys and values may have fewer heads: query head h reads key and value
head h // (heads / kv_heads) (Ainslie et al. 2023).
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

from napkin.torch_compile import set_up_compiler

Queries = Float[Tensor, "batch heads position head_dim"]
Keys = Float[Tensor, "batch kv_heads position head_dim"]
Mask = Float[Tensor, "*batch_and_heads query key"]


def attention_reference(queries: Queries, keys: Keys, values: Keys) -> Queries:
    """Causal attention with scale 1/sqrt(head_dim), holding all position² scores in fp32."""
    group = queries.shape[1] // keys.shape[1]
    keys = repeat(keys, "b h t c -> b (h group) t c", group=group)
    values = repeat(values, "b h t c -> b (h group) t c", group=group)

    scores = queries.float() @ keys.float().transpose(-2, -1) / queries.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(diagonal=1)
    weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    return (weights @ values.float()).to(queries.dtype)


def plain_attention(queries: Queries, keys: Keys, values: Keys, mask: Mask, scale: float) -> Queries:
    """Attention as matrix products and a softmax; `mask` is added to the scores.

    Scores and weights are in the queries' dtype or, under autocast, in autocast's; the softmax sums in fp32.

    Its backward pass is written out because autograd would keep more: scores that were masked in place, and gradients
    on their way through views. Kept here are queries, keys, values and the weights, which overwrite the scores.
    """
    device_type = queries.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    return _PlainAttention.apply(queries, keys, values, mask, scale)  # pyright: ignore[reportReturnType]


class _PlainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        # `plain_attention` has chosen the dtypes.
        with torch.autocast(queries.device.type, enabled=False):
            batch, n_heads, length, head_dim = queries.shape
            n_kv_heads = keys.shape[1]
            # The group of queries that share a key is one matrix.
            grouped = (queries * scale).reshape(batch, n_kv_heads, -1, head_dim)
            scores = (
                (grouped @ keys.transpose(-2, -1)).view(batch, n_heads, length, length).add_(mask.to(queries.dtype))
            )
            weights = torch.softmax(scores, dim=-1, out=scores).view(batch, n_kv_heads, -1, length)
            ctx.save_for_backward(grouped, keys, values, weights)
            ctx.scale = scale
            return (weights @ values).view(queries.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grouped, keys, values, weights = ctx.saved_tensors
        gradient = grad_outputs[0].reshape(grouped.shape)
        grad_values = weights.transpose(-2, -1) @ gradient
        grad_scores = gradient @ values.transpose(-2, -1)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_scores, weights, -1, weights.dtype)
        grad_queries = (grad_scores @ keys).mul_(ctx.scale).view(grad_outputs[0].shape)
        # The saved queries include the scale.
        grad_keys = grad_scores.transpose(-2, -1) @ grouped
        return grad_queries, grad_keys, grad_values, None, None


@no_type_check  # flex_attention compiles it into its kernel
def softcap(scores: Tensor, cap: float) -> Tensor:
    """cap · tanh(score / cap): scores approach ±cap and never exceed it (Gemma Team 2024)."""
    return cap * torch.tanh(scores / cap)


def softcapped_attention(queries: Queries, keys: Keys, values: Keys, mask: Mask, scale: float, cap: float) -> Queries:
    """softmax(softcap(q · kᵀ · scale, cap) + mask) · v; autograd differentiates it."""
    batch, n_kv_heads, length, head_dim = keys.shape
    grouped = (queries * scale).reshape(batch, n_kv_heads, -1, head_dim)
    scores = softcap(grouped @ keys.transpose(-2, -1), cap).view(batch, queries.shape[1], length, length)
    # In place: the scores are the largest tensors of a small model, and they are not needed without the mask.
    weights = scores.add_(mask.to(scores.dtype)).softmax(dim=-1)
    return (weights.view(batch, n_kv_heads, -1, length) @ values).view(queries.shape)


def fused_attention(queries: Queries, keys: Keys, values: Keys, mask: Mask | None, scale: float) -> Queries:
    """torch's scaled_dot_product_attention; causal if there is no mask."""
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if mask is None else mask.to(queries.dtype),
        is_causal=mask is None,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )


def flex_attention(
    queries: Queries,
    keys: Keys,
    values: Keys,
    score_mod: Callable[..., Tensor],
    block_mask: Any,
    scale: float,
    *,
    kernel: Callable[..., Tensor] | None = None,
) -> Queries:
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
