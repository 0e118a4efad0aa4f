"""Root-mean-square normalisation."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · gain (Zhang & Sennrich 2019), computed in fp32 and returned in x's dtype."""

    gain: Float[Tensor, " d_model"]

    def __init__(self, d_model: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Scale each vector to a root mean square of 1, then each of its numbers by its gain."""
        # In bf16 the mean of a thousand squares would keep two digits.
        wide = x.float()
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * inverse_rms * self.gain).to(x.dtype)
