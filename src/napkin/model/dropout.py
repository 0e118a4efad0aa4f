"""Dropout (Srivastava et al. 2014): in training, numbers set to 0 at random, the others scaled up to make good."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Dropout(nn.Module):
    """Each number is 0 with probability p, else divided by 1 - p; in evaluation it passes as it is.

    The numbers are drawn from torch's global generator of x's device.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Drop, in training."""
        if not self.training:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.p)
        return x * kept.div_(1 - self.p)


def make_dropout(p: float) -> nn.Module:
    """A dropout, for p = 0 the one that does nothing."""
    return Dropout(p) if p else nn.Identity()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation, where nothing is dropped and the loss is cross-entropy alone, and back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
