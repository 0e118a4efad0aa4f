"""The feed-forward layer: each position thinks for itself."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from napkin.model.linear import Linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020), with silu(z) = z · sigmoid(z)."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        residual_scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        # One matrix for both: one product to launch, and under autocast one cast of the input.
        self.gate_up = Linear(d_model, 2 * d_ff, generator=generator)
        self.down = Linear(d_ff, d_model, std=residual_scale * d_ff**-0.5, generator=generator)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply to each vector."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
