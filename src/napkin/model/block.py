"""One layer of the Transformer."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from napkin.model.attention import CausalSelfAttention
from napkin.model.feed_forward import SwiGLU
from napkin.model.normalization import RMSNorm


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): pre-norm (Xiong et al. 2020).

    `residual_scale` multiplies the starting std of the two matrices that write into the residual stream.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_ff: int,
        *,
        norm_eps: float = 1e-5,
        residual_scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(d_model, eps=norm_eps)
        self.attention = CausalSelfAttention(
            d_model, n_heads, n_kv_heads, residual_scale=residual_scale, generator=generator
        )
        self.feed_forward_norm = RMSNorm(d_model, eps=norm_eps)
        self.feed_forward = SwiGLU(d_model, d_ff, residual_scale=residual_scale, generator=generator)

    def forward(
        self,
        x: Float[Tensor, "batch position d_model"],
        cosines: Float[Tensor, "position head_dim"],
        signed_sines: Float[Tensor, "position head_dim"],
    ) -> Float[Tensor, "batch position d_model"]:
        """Read from the residual stream twice, write to it twice; the tables are RotaryEmbedding's."""
        x = x + self.attention(self.attention_norm(x), cosines, signed_sines)
        return x + self.feed_forward(self.feed_forward_norm(x))
