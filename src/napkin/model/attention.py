"""Causal self-attention, multi-head or grouped-query: softmax(q · kᵀ / sqrt(head_dim)) · v over the past."""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from napkin.model.linear import Linear
from napkin.model.position import rotate


class CausalSelfAttention(nn.Module):
    """Attention of each position to itself and those before it (Vaswani et al. 2017).

    Query head h reads key and value head h // (n_heads / n_kv_heads) (Ainslie et al. 2023).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        *,
        residual_scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        head_dim = d_model // n_heads
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        # One matrix for all three: one product to launch, and under autocast one cast of the input.
        self.query_key_value = Linear(d_model, (n_heads + 2 * n_kv_heads) * head_dim, generator=generator)
        self.output = Linear(d_model, d_model, std=residual_scale * d_model**-0.5, generator=generator)

    def forward(
        self,
        x: Float[Tensor, "batch position d_model"],
        cosines: Float[Tensor, "position head_dim"],
        signed_sines: Float[Tensor, "position head_dim"],
    ) -> Float[Tensor, "batch position d_model"]:
        """Attend; the tables are RotaryEmbedding's for these positions."""
        n_queries_and_keys = self.n_heads + self.n_kv_heads
        heads = rearrange(self.query_key_value(x), "b t (h c) -> b t h c", h=n_queries_and_keys + self.n_kv_heads)
        queries_and_keys, values = heads.split((n_queries_and_keys, self.n_kv_heads), dim=2)
        queries, keys = rotate(queries_and_keys, cosines, signed_sines).split((self.n_heads, self.n_kv_heads), dim=2)
        queries, keys, values = (rearrange(part, "b t h c -> b h t c") for part in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=self.n_kv_heads != self.n_heads
        )
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
