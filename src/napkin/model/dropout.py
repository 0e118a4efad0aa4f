"""Dropout (Srivastava et al. 2014): in training, numbers are set to 0 at random and the others scaled up, so that the
mean stays."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Dropout(nn.Module):
    """Each number is set to 0 with probability p, else divided by 1 - p; in evaluation it is unchanged.

    The numbers are drawn from torch's global generator of x's device.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Drop, if in training."""
        if not self.training:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.p)
        return x * kept.div_(1 - self.p)


def make_dropout(p: float) -> nn.Module:
    """A dropout, or an identity for p = 0."""
    return Dropout(p) if p else nn.Identity()
