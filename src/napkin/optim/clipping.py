"""Gradient clipping by global norm (Pascanu et al. 2013), and dynamic loss scaling (Micikevicius et al. 2018)."""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.optim.saved_state import local

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 1000
_LARGEST_SCALE = 2.0**24


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    weights: Sequence[float] | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, ""]:
    """Scale all gradients in place by one factor so that their joint 2-norm is at most max_norm.

    Returns the norm before clipping in fp32, on the gradients' device, without waiting for a GPU. If any gradient is
    infinite or NaN, so is the returned norm, and the gradients must not be used for an update: the caller checks the
    norm. Parameters without a gradient are skipped; without any the norm is 0.

    Of sharded gradients it sees the local part. With `weights`, one per parameter, the squares of each gradient are
    multiplied by its weight, and `sum_over_ranks` adds them up over ranks.
    """
    parameters = list(parameters)
    norm, factor = norm_and_factor(parameters, max_norm, weights=weights, sum_over_ranks=sum_over_ranks)
    if gradients := _gradients(parameters):
        torch._foreach_mul_(gradients, factor)
    return norm


@torch.no_grad()
def norm_and_factor(
    parameters: Sequence[Tensor],
    max_norm: float,
    *,
    weights: Sequence[float] | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The norm that `clip_gradients` returns, and the factor by which it scales the gradients, on their device."""
    gradients = _gradients(parameters)
    if not gradients:
        return torch.zeros(()), torch.ones(())
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    if weights is not None:
        used = (weight for weight, parameter in zip(weights, parameters, strict=True) if parameter.grad is not None)
        norms = torch._foreach_mul(norms, [weight**0.5 for weight in used])
    total = torch.linalg.vector_norm(torch.stack(norms))
    if sum_over_ranks is not None:
        total = sum_over_ranks(total.square()).sqrt()
    # The factor is exactly 1 below the limit, so that gradients within it keep their last bit.
    return total, max_norm / total.clamp(min=max_norm)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


class LossScale:
    """The factor that brings a loss's gradients into the range of fp16: a power of two, so that it rounds nothing.

    Backpropagation runs on loss · scale; before clipping, the gradients are divided by the scale. If one of them
    overflowed, the update is skipped and the scale halved; after 1000 good steps in a row it is doubled.
    """

    def __init__(self) -> None:
        self.scale = FIRST_SCALE
        self.good_steps = 0
        """Steps without overflow since the scale last changed."""
        self.updates = 0
        """Updates that were not skipped."""

    def of_rank(self, ranks: int) -> float:
        """The factor of the loss on each of several ranks.

        The loss of a rank is already weighted by the number of ranks, over whose gradients the mean is taken. Divided
        by it, a rank's numbers in fp16 are as large as those of a single process.
        """
        return self.scale / ranks

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor], *, ranks: int = 1) -> None:
        """Divide the gradients by the scale."""
        torch._foreach_mul_(_gradients(parameters), 1 / self.of_rank(ranks))

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
