"""Attention of some queries to some keys, in a form whose results can be merged: with the logsumexp of the scores.

Fused operators are used where a device has one and nothing but the causal mask is to be added to the scores; else
matrix products, which hold the scores of the block.
"""

import torch
import torch.nn.functional as F
from einops import repeat
from jaxtyping import Float
from torch import Tensor

Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Mask = Float[Tensor, "*#batch_and_heads query key"]
Logsumexp = Float[Tensor, "batch heads query"]

_HALF = (torch.float16, torch.bfloat16)
_ROWS = 32
"""The memory-efficient kernel's logsumexp has a multiple of so many rows; what is beyond the queries is infinite."""


def attend(
    queries: Queries, keys: Keys, values: Keys, mask: Mask | None, scale: float, softcap: float, *, causal: bool
) -> tuple[Queries, Logsumexp]:
    """The mixed values, and the logsumexp of each query's scores, in fp32 or wider: -infinity where it sees no key.

    `causal` only counts without a mask; then there are as many keys as queries. Scores are bounded by `softcap` unless
    it is 0.
    """
    if mask is not None or softcap:
        return _attend_by_products(queries, keys, values, _with_causal(mask, queries, causal=causal), scale, softcap)
    aten = torch.ops.aten
    if not queries.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, causal, scale=scale)
    if queries.dtype in _HALF:
        return aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal, scale=scale)[:2]
    keys, values = _repeated(queries, keys), _repeated(queries, values)
    mixed, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        queries, keys, values, None, True, 0.0, causal, scale=scale
    )
    return mixed, logsumexp[..., : queries.shape[-2]]


def attend_backward(
    gradient: Queries,
    queries: Queries,
    keys: Keys,
    values: Keys,
    mask: Mask | None,
    mixed: Queries,
    logsumexp: Logsumexp,
    scale: float,
    softcap: float,
    *,
    causal: bool,
) -> tuple[Queries, Keys, Keys]:
    """The gradients of queries, keys and values by this block; `mixed` and `logsumexp` are those of all keys."""
    if mask is not None or softcap:
        mask = _with_causal(mask, queries, causal=causal)
        return _products_backward(gradient, queries, keys, values, mask, mixed, logsumexp, scale, softcap)
    aten = torch.ops.aten
    if not queries.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, queries, keys, values, mixed, logsumexp, 0.0, causal, scale=scale
        )
    if queries.dtype in _HALF:
        # Without dropout the state of the random generator is not read.
        state = torch.zeros(2, dtype=torch.uint64, device=queries.device)
        lengths = None, None, queries.shape[-2], keys.shape[-2]
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, queries, keys, values, mixed, logsumexp, *lengths, 0.0, causal, state, state[1], scale=scale
        )
    logsumexp = F.pad(logsumexp, (0, -logsumexp.shape[-1] % _ROWS), value=float("inf"))
    state = torch.zeros((), dtype=torch.int64, device=queries.device)
    wanted = [True, True, True, False]
    repeated = _repeated(queries, keys), _repeated(queries, values)
    grad_queries, grad_keys, grad_values, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient, queries, *repeated, None, mixed, logsumexp, state, state, 0.0, wanted, causal, scale=scale
    )
    return grad_queries, _summed(grad_keys, keys), _summed(grad_values, values)


def _attend_by_products(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(queries, keys, mask, scale, softcap)
    logsumexp = scores.logsumexp(dim=-1)
    # Where a query sees no key, its weights are 0, not NaN.
    weights = (scores - logsumexp.masked_fill(logsumexp.isneginf(), 0.0)[..., None]).exp_()
    return weights.to(queries.dtype) @ _repeated(queries, values), logsumexp


def _products_backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    mixed: Tensor,
    logsumexp: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(queries, keys, None, scale, softcap)
    masked = scores if mask is None else scores + mask
    weights = (masked - logsumexp[..., None]).exp_()
    grad_values = weights.to(queries.dtype).mT @ gradient
    grad_weights = (gradient @ _repeated(queries, values).mT).to(weights.dtype)
    grad_scores = weights * (grad_weights - (gradient * mixed).sum(dim=-1, keepdim=True, dtype=weights.dtype))
    if softcap:
        grad_scores *= 1 - (scores / softcap).square_()
    grad_scores = (grad_scores * scale).to(queries.dtype)
    grad_keys = grad_scores.mT @ queries
    return grad_scores @ _repeated(queries, keys), _summed(grad_keys, keys), _summed(grad_values, values)


def _scores(queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    scores = (queries @ _repeated(queries, keys).mT).to(torch.promote_types(queries.dtype, torch.float32)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return scores if mask is None else scores + mask


def _with_causal(mask: Tensor | None, queries: Tensor, *, causal: bool) -> Tensor | None:
    if mask is not None or not causal:
        return mask
    length = queries.shape[-2]
    hidden = torch.full((length, length), float("-inf"), device=queries.device)
    return hidden.triu_(1)


def _repeated(queries: Tensor, keys: Tensor) -> Tensor:
    """The keys that each query head reads, one by one."""
    group = queries.shape[1] // keys.shape[1]
    return keys if group == 1 else repeat(keys, "b h t c -> b (h group) t c", group=group)


def _summed(gradient: Tensor, keys: Tensor) -> Tensor:
    """Added up over the query heads that read the same keys."""
    return gradient.unflatten(1, (keys.shape[1], -1)).sum(dim=2)
