"""AdamW's update of all parameters of a group, which writes narrow copies of the weights in the same pass.

The gradient is multiplied by the clipping factor on its way, which spares a pass over it. On a GPU it is one launch,
whatever the number of tensors (triton_adamw.py): the host does per group what it would do for one tensor.
"""

from collections.abc import Sequence

from torch import Tensor

from napkin.kernels.operators import operator


def fused_adamw_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    *,
    copies: Sequence[Tensor] = (),
    factor: Tensor | None = None,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One step of `napkin.optim.AdamW` for each parameter, in place; `copies`, if there are any, become the parameters
    in their own dtype.

    Tensors of a place are contiguous and of one shape; averages are fp32, `step` counts from 1. `factor` is one number
    on the device, which gradients are multiplied by; it is not waited for.
    """
    settings = (lr, *betas, eps, weight_decay, step)
    _adamw(parameters, gradients, averages, squares, copies, factor, *settings)


def adamw_reference(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    copies: Sequence[Tensor],
    factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    tensors = zip(parameters, gradients, averages, squares, copies or [None] * len(parameters), strict=True)
    for parameter, gradient, average, square, copy in tensors:
        wide = gradient.to(average.dtype)
        wide = wide if factor is None else wide * factor
        average.mul_(beta1).add_(wide, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(eps)
        updated = parameter.to(average.dtype) * (1 - lr * weight_decay) - lr / (1 - beta1**step) * average / root
        parameter.copy_(updated)
        if copy is not None:
            copy.copy_(updated)


_adamw = operator(
    "fused_adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] averages, Tensor(c!)[] squares, "
    "Tensor(d!)[] copies, Tensor? factor, float lr, float beta1, float beta2, float eps, float weight_decay, int step) "
    "-> ()",
    fake=lambda *arguments: None,
    triton="pointwise.triton_adamw.adamw",
)(adamw_reference)
