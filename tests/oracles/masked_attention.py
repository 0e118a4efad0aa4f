"""Attention under every mask that flash attention knows, spelled out over all pairs in fp64."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from napkin.kernels.attention.flash import document_bounds

CASES: list[dict[str, Any]] = [
    {"head_dim": 32, "n_queries": 70, "n_keys": 70},
    {"head_dim": 64, "n_queries": 33, "n_keys": 130, "is_causal": False},
    {"head_dim": 40, "n_queries": 70, "n_keys": 83, "offset": 13, "window": 20, "softcap": 3.0, "documents": True},
    {"head_dim": 16, "n_queries": 33, "n_keys": 70, "offset": 5, "window": 7},
    {"head_dim": 32, "n_queries": 129, "n_keys": 129, "documents": True},
    {"head_dim": 256, "n_queries": 37, "n_keys": 37, "softcap": 5.0},
]


def problem(
    *,
    head_dim: int,
    n_queries: int,
    n_keys: int,
    offset: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: bool = False,
    is_causal: bool = True,
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """Queries of four heads, keys and values of two, an upstream gradient, and the settings of flash_attention."""
    generator = torch.Generator().manual_seed(0)

    def heads(n: int, length: int) -> Tensor:
        # As a model has them: heads after positions in memory.
        normal = torch.randn(2, length, n, head_dim, generator=generator, dtype=torch.float64).transpose(1, 2)
        return normal.to(dtype)

    inputs = [(heads(4, n_queries) * scale).to(dtype), heads(2, n_keys), heads(2, n_keys)]
    inputs = [each.requires_grad_() for each in inputs]
    ids = (torch.rand(2, n_keys, generator=generator) < 0.1).cumsum(dim=1) * 2
    settings = {
        "query_offset": (n_keys - n_queries if offset is None else offset) if is_causal else None,
        "window": window,
        "softcap": softcap,
        "bounds": document_bounds(ids) if documents else None,
        "is_causal": is_causal,
    }
    return inputs, heads(4, n_queries), settings


def visible(n_queries: int, n_keys: int, settings: dict[str, Any]) -> Tensor:
    """[batch or 1, 1, query, key]: which pairs count."""
    if not settings["is_causal"]:
        return torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool)
    offset = settings["query_offset"]
    positions, keys = torch.arange(offset, offset + n_queries)[:, None], torch.arange(n_keys)
    seen = (keys <= positions) & (keys > positions - (settings["window"] or n_keys))
    if settings["bounds"] is None:
        return seen[None, None]
    starts = settings["bounds"][0]
    return (seen & (starts[:, None, :] == starts[:, offset : offset + n_queries, None]))[:, None]


def attention_by_hand(inputs: Sequence[Tensor], settings: dict[str, Any]) -> Tensor:
    """In fp64, differentiable."""
    query, key, value = (each.double() for each in inputs)
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if settings["softcap"]:
        scores = settings["softcap"] * torch.tanh(scores / settings["softcap"])
    seen = visible(query.shape[2], key.shape[2], settings)
    return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ value


def gradients(result: Tensor, inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """Of `inputs`, for an upstream gradient."""
    return torch.autograd.grad(result, inputs, upstream.to(result.dtype))
