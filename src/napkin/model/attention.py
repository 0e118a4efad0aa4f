"""Self-attention, multi-head, grouped-query or multi-query: softmax(q · kᵀ / sqrt(head_dim)) · v under a mask."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.kernels.pointwise.rotary import COMPILED_ROTATIONS, FUSED_ROTATIONS, rotate_halves
from napkin.model.attention_implementations import FusedAttention, PlainAttention
from napkin.model.kv_cache import CachedPass
from napkin.model.layers import Device, LinearFactory
from napkin.model.masks import CausalMask
from napkin.model.norm import NoQKNorm
from napkin.model.positions import PAIRINGS, NoPositions, RotaryEmbedding, Rotation


@dataclass(frozen=True)
class ForwardContext:
    """State that all layers share in one forward pass."""

    rotation: Rotation = ()
    """The cosines and sines by which queries and keys are rotated."""
    mask: Any = None
    """The mask that the attention implementation prepared: which tokens see each other."""
    cache: CachedPass | None = None
    """Keys and values of earlier positions; None in training."""
    layer: int = 0
    """The layer whose keys and values those are."""


class CausalSelfAttention(nn.Module):
    """Attention of each position to itself and those before it (Vaswani et al. 2017).

    Query head h reads key and value head h // (n_heads / n_kv_heads) (Ainslie et al. 2023). `attend` is the attention
    implementation; `qk_norm` acts on queries and keys before `rotate`. By itself the layer is causal and has rotary
    positions:

    >>> import torch
    >>> CausalSelfAttention(64, 4)(torch.zeros(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    A model makes the `ForwardContext` once per step instead, for all its layers.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        attend: PlainAttention | FusedAttention | None = None,
        rotate: Callable[..., Tensor] = rotate_halves,
        qk_norm: nn.Module | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        linears: LinearFactory | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        _check_heads(d_model, n_heads, n_kv_heads, head_dim)
        linears = (linears or LinearFactory()).on(device, dtype)
        head_dim = head_dim or d_model // n_heads
        self.head_dim = head_dim
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.attend = attend or FusedAttention(n_heads, scale=head_dim**-0.5, sees=CausalMask())
        self.rotate = rotate
        widths = (n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim)
        self.query_key_value = linears.linear(d_model, *widths, bias=qkv_bias)
        self.qk_norm = qk_norm or NoQKNorm()
        self.output = linears.residual_output(n_heads * head_dim, d_model, bias=output_bias)

    def forward(
        self, x: Float[Tensor, "batch position d_model"], context: ForwardContext | None = None
    ) -> Float[Tensor, "batch position d_model"]:
        """Attend, with the rotation and mask of `context`; without one, from position 0 in one document."""
        context = self._own_context(x) if context is None else context
        n_queries_and_keys = self.n_heads + self.n_kv_heads
        heads = rearrange(self.query_key_value(x), "b t (h c) -> b t h c", h=n_queries_and_keys + self.n_kv_heads)
        queries_and_keys, values = heads.split((n_queries_and_keys, self.n_kv_heads), dim=2)
        rotated = self.rotate(self.qk_norm(queries_and_keys), *context.rotation)
        queries, keys = rotated.split((self.n_heads, self.n_kv_heads), dim=2)
        queries, keys, values = (rearrange(part, "b t h c -> b h t c") for part in (queries, keys, values))
        if context.cache is not None:
            keys, values = context.cache.update(context.layer, keys, values)
        mixed = self.attend(queries, keys, values, context.mask)
        return self.output(rearrange(mixed, "b h t c -> b t (h c)"))

    def _own_context(self, x: Tensor) -> ForwardContext:
        length = x.shape[1]
        rotation: Rotation = ()
        for pairing, (rotate, _) in PAIRINGS.items():
            if self.rotate in (rotate, COMPILED_ROTATIONS[rotate], FUSED_ROTATIONS[rotate]):
                with x.device:
                    rotation = RotaryEmbedding(self.head_dim, length, pairing=pairing)(length)
        return ForwardContext(rotation, self.attend.prepare(NoPositions(), length, None, x.device))


def _check_heads(d_model: int, n_heads: int, n_kv_heads: int, head_dim: int | None) -> None:
    if head_dim is None and d_model % n_heads:
        raise NapkinError(f"d_model {d_model} does not divide into n_heads {n_heads}: use a divisor, or set head_dim")
    if n_heads % n_kv_heads:
        raise NapkinError(
            f"n_heads {n_heads} does not divide into n_kv_heads {n_kv_heads} groups: use a divisor of {n_heads}"
        )
