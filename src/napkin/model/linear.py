"""The linear layer: x · Wᵀ."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from napkin.model.initialization import truncated_normal


class Linear(nn.Module):
    """A matrix without bias, applied to the last dimension.

    It starts truncated-normal at ±3 std; std defaults to 1/sqrt(in_features), which keeps the variance of its
    input (LeCun et al. 1998).
    """

    weight: Float[Tensor, "out_features in_features"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        std: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.weight = truncated_normal(
            out_features, in_features, std=in_features**-0.5 if std is None else std, generator=generator
        )

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        """Multiply each vector by the matrix."""
        return F.linear(x, self.weight)
