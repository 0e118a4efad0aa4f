"""Attention as matrix products and a softmax, with its gradient written out.

Autograd would keep copies: of scores that were masked in place, of gradients on their way through views. Kept here are
queries, keys, values and the weights, which took the scores' place.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q · kᵀ · scale + mask) · v for queries [batch, heads, position, head_dim]; keys and values may have fewer
    heads, which groups of queries share. Scores and weights are in the format of the queries or, where autocast is on,
    in its; the softmax sums in fp32.
    """
    device_type = queries.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    return _PlainAttention.apply(queries, keys, values, mask, scale)  # pyright: ignore[reportReturnType]


class _PlainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        # Formats are chosen above.
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
        # The queries kept have the scale in them.
        grad_keys = grad_scores.transpose(-2, -1) @ grouped
        return grad_queries, grad_keys, grad_values, None, None
