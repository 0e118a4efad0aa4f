"""The linear layer: x · Wᵀ + b."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from napkin.model.initialization import truncated_normal


class Linear(nn.Module):
    """A matrix applied to the last dimension, and a bias where one is wanted, which starts at 0.

    It starts truncated-normal at ±3 std; std defaults to 1/sqrt(in_features), which keeps the variance of its
    input (LeCun et al. 1998).
    """

    weight: Float[Tensor, "out_features in_features"]
    bias: Float[Tensor, " out_features"] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        std: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.weight = truncated_normal(
            out_features, in_features, std=in_features**-0.5 if std is None else std, generator=generator
        )
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)
        self.multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        """What multiplies, in the format of its choice."""

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        """Multiply each vector by the matrix, add the bias."""
        return self.multiply(x, self.weight, self.bias)


class MultipliedLinear(Linear):
    """A linear layer whose matrix acts `multiplier` times as large as it is: what µP makes of hidden layers.

    The matrix starts larger by 1/multiplier, so the layer starts as any other. But Adam moves each number by about the
    learning rate, whatever its size: the layer then moves `multiplier` times as fast (Yang et al. 2022, table 8 and
    lemma J.1), which for 1/width is as fast at every width.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        multiplier: float,
        bias: bool = False,
        std: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        std = (in_features**-0.5 if std is None else std) / multiplier
        super().__init__(in_features, out_features, bias=bias, std=std, generator=generator)
        self.multiplier = multiplier

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        """Multiply each vector by the matrix and the multiplier, add the bias."""
        return self.multiply(x * self.multiplier, self.weight, self.bias)
