"""Self-attention, multi-head, grouped-query or multi-query: softmax(q · kᵀ / sqrt(head_dim)) · v over what is seen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from napkin.model.attention_forms import FlexAttention, FusedAttention, PlainAttention
from napkin.model.linear_maker import LinearMaker
from napkin.model.qk_norm import NoQKNorm
from napkin.model.rotation import Rotation, rotate
from napkin.model.visibility import Causal


@dataclass(frozen=True)
class Shared:
    """What all layers of one forward pass share."""

    rotation: Rotation = ()
    """The angles by which queries and keys turn."""
    pairs: Any = None
    """What the form of attention prepared: which tokens see each other."""


class CausalSelfAttention(nn.Module):
    """Attention of each position to itself and those before it (Vaswani et al. 2017).

    Query head h reads key and value head h // (n_heads / n_kv_heads) (Ainslie et al. 2023). `attend` is the form of
    attention, `qk_norm` acts on queries and keys before `rotate` turns them.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        *,
        head_dim: int | None = None,
        attend: PlainAttention | FusedAttention | FlexAttention | None = None,
        rotate: Callable[..., Tensor] = rotate,
        qk_norm: nn.Module | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        make: LinearMaker | None = None,
    ) -> None:
        super().__init__()
        make = make or LinearMaker()
        head_dim = head_dim or d_model // n_heads
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.attend = attend or FusedAttention(n_heads, scale=head_dim**-0.5, sees=Causal())
        self.rotate = rotate
        widths = (n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim)
        self.query_key_value = make.linear(d_model, *widths, bias=qkv_bias)
        self.qk_norm = qk_norm or NoQKNorm()
        self.output = make.writer(n_heads * head_dim, d_model, bias=output_bias)

    def forward(
        self, x: Float[Tensor, "batch position d_model"], shared: Shared
    ) -> Float[Tensor, "batch position d_model"]:
        """Attend, as `shared` says for these positions."""
        n_queries_and_keys = self.n_heads + self.n_kv_heads
        heads = rearrange(self.query_key_value(x), "b t (h c) -> b t h c", h=n_queries_and_keys + self.n_kv_heads)
        queries_and_keys, values = heads.split((n_queries_and_keys, self.n_kv_heads), dim=2)
        turned = self.rotate(self.qk_norm(queries_and_keys), *shared.rotation)
        queries, keys = turned.split((self.n_heads, self.n_kv_heads), dim=2)
        queries, keys, values = (rearrange(part, "b t h c -> b h t c") for part in (queries, keys, values))
        mixed = self.attend(queries, keys, values, shared.pairs)
        return self.output(rearrange(mixed, "b h t c -> b t (h c)"))


def attention_reference(
    queries: Float[Tensor, "batch heads position head_dim"],
    keys: Float[Tensor, "batch kv_heads position head_dim"],
    values: Float[Tensor, "batch kv_heads position head_dim"],
) -> Float[Tensor, "batch heads position head_dim"]:
    """Causal attention spelled out: what the fused operator computes, holding all position² scores in fp32."""
    group = queries.shape[1] // keys.shape[1]
    keys = repeat(keys, "b h t c -> b (h group) t c", group=group)
    values = repeat(values, "b h t c -> b (h group) t c", group=group)

    scores = queries.float() @ keys.float().transpose(-2, -1) / queries.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(diagonal=1)
    weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    return (weights @ values.float()).to(queries.dtype)
