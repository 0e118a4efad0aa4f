"""Dynamic loss scaling (Micikevicius et al. 2018): gradients are scaled up into the range of fp16.

Backpropagation runs on loss · scale; before clipping, the gradients are divided by the scale. If one of them
overflowed, the update is skipped and the scale halved; after 1000 good steps in a row it is doubled.
"""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable

import torch
from torch import Tensor

from napkin.optim.sharded_tensors import local

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 1000
_LARGEST_SCALE = 2.0**24


class LossScale:
    """The scale, a power of two, so that scaling rounds nothing; and what adapts it."""

    def __init__(self) -> None:
        self.scale = FIRST_SCALE
        self.good_steps = 0
        """Steps without overflow since the scale last changed."""
        self.updates = 0
        """Updates that were not skipped."""

    def of_rank(self, ranks: int) -> float:
        """What each of several ranks multiplies its loss by.

        The loss of a rank is already weighted by the number of ranks, over whose gradients the mean is taken. Divided
        by it, a rank's numbers in fp16 are as large as those of a single process.
        """
        return self.scale / ranks

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor], *, ranks: int = 1) -> None:
        """Divide the gradients by the scale."""
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1 / self.of_rank(ranks))

    def accepts(self, norm: Tensor) -> bool:
        """True if a gradient norm is finite, so that the update can be made; adapts the scale. Waits for the GPU."""
        # The value is read in this module, where the accountant supplies it when it counts a step without data.
        finite = bool(torch.isfinite(norm).item())
        self.good_steps = self.good_steps + 1 if finite else 0
        self.updates += finite
        if not finite:
            self.scale /= 2
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = min(2 * self.scale, _LARGEST_SCALE), 0
        return finite

    def to_tensor(self) -> Tensor:
        """The state as three numbers, for a checkpoint."""
        return torch.tensor([self.scale, self.good_steps, self.updates], dtype=torch.float64)

    def from_tensor(self, stored: Tensor) -> None:
        """Restore the state that `to_tensor` returned."""
        self.scale, self.good_steps, self.updates = float(stored[0]), int(stored[1]), int(stored[2])
