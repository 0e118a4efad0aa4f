"""Gradient clipping by global norm (Pascanu et al. 2013)."""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.optim.sharded_tensors import local


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
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    if weights is not None:
        used = (weight for weight, parameter in zip(weights, parameters, strict=True) if parameter.grad is not None)
        norms = torch._foreach_mul(norms, [weight**0.5 for weight in used])
    total = torch.linalg.vector_norm(torch.stack(norms))
    if sum_over_ranks is not None:
        total = sum_over_ranks(total.square()).sqrt()
    # The factor is exactly 1 below the limit, so that gradients within it keep their last bit.
    torch._foreach_mul_(gradients, max_norm / total.clamp(min=max_norm))
    return total
