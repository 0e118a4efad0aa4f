"""Normalization layers, which make a layer independent of the size of what it reads; and norms of queries and keys."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from napkin.kernels.norms.normalization import layer_norm, rms_norm
from napkin.model.layers import Device

Vectors = Float[Tensor, "*batch d_model"]
QueriesAndKeys = Float[Tensor, "batch position heads head_dim"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · gain (Zhang & Sennrich 2019), computed in fp32 and returned in x's dtype."""

    gain: Float[Tensor, " d_model"]

    def __init__(
        self, d_model: int, *, eps: float = 1e-5, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))
        self.normalize: Callable[..., Any] = rms_norm
        """The form of the operator."""
        self.adds = False
        """True if that form adds a residual in the same pass; then a call with one returns the sum and its norm."""

    def forward(self, x: Vectors, residual: Vectors | None = None) -> Vectors | tuple[Vectors, Vectors]:
        if residual is None:
            return self.normalize(x, self.gain, self.eps)
        return self.normalize(x, self.gain, self.eps, residual)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) · gain + bias (Ba et al. 2016), computed in fp32, returned in x's dtype."""

    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"] | None

    def __init__(
        self,
        d_model: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))
        zeros = nn.Parameter(torch.zeros(d_model, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", zeros)
        self.normalize: Callable[..., Any] = layer_norm
        """The form of the operator."""
        self.adds = False
        """True if that form adds a residual, as in RMSNorm."""

    def forward(self, x: Vectors, residual: Vectors | None = None) -> Vectors | tuple[Vectors, Vectors]:
        if residual is None:
            return self.normalize(x, self.gain, self.bias, self.eps)
        return self.normalize(x, self.gain, self.bias, self.eps, residual)


def sum_and_norm(norm: nn.Module, x: Vectors, written: Vectors) -> tuple[Vectors, Vectors]:
    """x + written, and the norm of that: in one operator where the norm's form adds."""
    if getattr(norm, "adds", False):
        return norm(written, x)
    summed = x + written
    return summed, norm(summed)


class NoNorm(nn.Module):
    """x unchanged: the ablation. Without norms nothing bounds the residual stream, which grows with depth."""

    def __init__(self, d_model: int, *, eps: float = 1e-5) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return x


NORMS: dict[str, type[RMSNorm] | type[LayerNorm] | type[NoNorm]] = {"rms": RMSNorm, "layer": LayerNorm, "none": NoNorm}


MakeNorm = Callable[[int], nn.Module]


class NoQKNorm(nn.Module):
    """No norm of queries and keys."""

    def __init__(self, *sizes: int | MakeNorm) -> None:
        super().__init__()

    def forward(self, queries_and_keys: QueriesAndKeys) -> QueriesAndKeys:
        return queries_and_keys


class HeadQKNorm(nn.Module):
    """A norm for queries and one for keys keep their products, the scores, from growing (Henry et al. 2020).

    Each head is normalized by itself, with one gain for all query heads and one for all key heads (Qwen 3).
    """

    def __init__(self, n_heads: int, n_kv_heads: int, head_dim: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.heads = n_heads, n_kv_heads
        self.query_norm, self.key_norm = make_norm(head_dim), make_norm(head_dim)

    def forward(self, queries_and_keys: QueriesAndKeys) -> QueriesAndKeys:
        """Normalize; query heads come first."""
        queries, keys = queries_and_keys.split(self.heads, dim=2)
        return torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=2)


class AllHeadsQKNorm(nn.Module):
    """All query heads are normalized as one vector, and all key heads as another (OLMo 2)."""

    def __init__(self, n_heads: int, n_kv_heads: int, head_dim: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.heads = n_heads, n_kv_heads
        self.query_norm, self.key_norm = make_norm(n_heads * head_dim), make_norm(n_kv_heads * head_dim)

    def forward(self, queries_and_keys: QueriesAndKeys) -> QueriesAndKeys:
        """Normalize; query heads come first."""
        queries, keys = (part.flatten(2) for part in queries_and_keys.split(self.heads, dim=2))
        normed = torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=2)
        return normed.view(queries_and_keys.shape)


class HeadQueryNorm(nn.Module):
    """The norm of `HeadQKNorm` for queries alone."""

    def __init__(self, n_heads: int, head_dim: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.query_norm = make_norm(head_dim)

    def forward(self, queries: QueriesAndKeys) -> QueriesAndKeys:
        return self.query_norm(queries)


class AllHeadsQueryNorm(nn.Module):
    """The norm of `AllHeadsQKNorm` for queries alone."""

    def __init__(self, n_heads: int, head_dim: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.query_norm = make_norm(n_heads * head_dim)

    def forward(self, queries: QueriesAndKeys) -> QueriesAndKeys:
        return self.query_norm(queries.flatten(2)).view(queries.shape)


QUERY_NORMS: dict[str, Callable[[int, int, MakeNorm], nn.Module]] = {
    "none": NoQKNorm,
    "head": HeadQueryNorm,
    "all_heads": AllHeadsQueryNorm,
}

QK_NORMS: dict[str, Callable[[int, int, int, MakeNorm], nn.Module]] = {
    "none": NoQKNorm,
    "head": HeadQKNorm,
    "all_heads": AllHeadsQKNorm,
}
