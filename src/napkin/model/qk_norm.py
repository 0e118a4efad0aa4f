"""Norms of queries and keys, which keep their products, the scores, from growing without bound (Henry et al. 2020)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

QueriesAndKeys = Float[Tensor, "batch position heads head_dim"]


class NoQKNorm(nn.Module):
    """None."""

    def forward(self, queries_and_keys: QueriesAndKeys) -> QueriesAndKeys:
        """Pass them as they are."""
        return queries_and_keys


class HeadQKNorm(nn.Module):
    """Each head by itself, with one gain for all query heads and one for all key heads (Qwen 3)."""

    def __init__(self, n_heads: int, n_kv_heads: int, head_dim: int, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.heads = n_heads, n_kv_heads
        self.query_norm, self.key_norm = make_norm(head_dim), make_norm(head_dim)

    def forward(self, queries_and_keys: QueriesAndKeys) -> QueriesAndKeys:
        """Normalise; query heads come first."""
        queries, keys = queries_and_keys.split(self.heads, dim=2)
        return torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=2)


class AllHeadsQKNorm(nn.Module):
    """All query heads as one vector, and all key heads (OLMo 2)."""

    def __init__(self, n_heads: int, n_kv_heads: int, head_dim: int, make_norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.heads = n_heads, n_kv_heads
        self.query_norm, self.key_norm = make_norm(n_heads * head_dim), make_norm(n_kv_heads * head_dim)

    def forward(self, queries_and_keys: QueriesAndKeys) -> QueriesAndKeys:
        """Normalise; query heads come first."""
        queries, keys = (part.flatten(2) for part in queries_and_keys.split(self.heads, dim=2))
        normed = torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=2)
        return normed.view(queries_and_keys.shape)


def no_qk_norm(n_heads: int, n_kv_heads: int, head_dim: int, make_norm: Callable[[int], nn.Module]) -> nn.Module:
    """None, made like the others."""
    return NoQKNorm()


QK_NORMS: dict[str, Callable[[int, int, int, Callable[[int], nn.Module]], nn.Module]] = {
    "none": no_qk_norm,
    "head": HeadQKNorm,
    "all_heads": AllHeadsQKNorm,
}
