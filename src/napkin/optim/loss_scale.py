"""Dynamic loss scaling (Micikevicius et al. 2018): gradients are scaled up to where fp16 has numbers for them.

Backpropagation runs on loss · scale; before clipping, gradients are divided by the scale again. Where one of them
overflowed, the update is left out and the scale halved; after 1000 good steps in a row it is doubled.
"""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable

import torch
from torch import Tensor

from napkin.optim.shards import local

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 1000
_LARGEST_SCALE = 2.0**24


class LossScale:
    """The scale, and how it has come about: a power of two, so that scaling rounds nothing."""

    def __init__(self) -> None:
        self.scale = FIRST_SCALE
        self.good_steps = 0
        """Since the scale last changed."""
        self.updates = 0
        """That were not left out."""

    def of_rank(self, ranks: int) -> float:
        """What one of some ranks multiplies its loss by.

        It weighs its tokens by the number of ranks, of whose gradients the mean is taken: without that, numbers in
        fp16 are as large as one process's.
        """
        return self.scale / ranks

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor], *, ranks: int = 1) -> None:
        """Divide the gradients by the scale."""
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1 / self.of_rank(ranks))

    def accepts(self, norm: Tensor) -> bool:
        """Whether a gradient of that norm is fit for an update; the scale is adapted. Waits for a GPU."""
        # Reading it here, in this module: who counts a step without data answers for it.
        finite = bool(torch.isfinite(norm).item())
        self.good_steps = self.good_steps + 1 if finite else 0
        self.updates += finite
        if not finite:
            self.scale /= 2
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = min(2 * self.scale, _LARGEST_SCALE), 0
        return finite

    def to_tensor(self) -> Tensor:
        """All of it as three numbers, for a checkpoint."""
        return torch.tensor([self.scale, self.good_steps, self.updates], dtype=torch.float64)

    def from_tensor(self, stored: Tensor) -> None:
        """Go on from there."""
        self.scale, self.good_steps, self.updates = float(stored[0]), int(stored[1]), int(stored[2])
