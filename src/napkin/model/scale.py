"""A constant factor, and the factor of one, which costs nothing."""

from jaxtyping import Float
from torch import Tensor, nn


class Scale(nn.Module):
    """x times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Multiply."""
        return x * self.factor


def make_scale(factor: float) -> nn.Module:
    """A scale, for a factor of 1 the one that does nothing."""
    return nn.Identity() if factor == 1 else Scale(factor)
