"""AdamW's update, which writes a narrow copy of the weights in the same pass."""

import torch
from torch import Tensor

from napkin.kernels.operators import operator


def fused_adamw_(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    *,
    copy: Tensor | None = None,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One step of `napkin.optim.AdamW` for one parameter, in place; `copy` becomes the parameter in its own dtype.

    All are contiguous and of one shape; averages are fp32, `step` counts from 1.
    """
    settings = (lr, *betas, eps, weight_decay, step)
    torch.ops.napkin.fused_adamw_(parameter, gradient, average, square, copy, *settings)


def adamw_reference(
    parameter: Tensor,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    copy: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    wide = gradient.to(average.dtype)
    average.mul_(beta1).add_(wide, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_().add_(eps)
    updated = parameter.to(average.dtype) * (1 - lr * weight_decay) - lr / (1 - beta1**step) * average / root
    parameter.copy_(updated)
    if copy is not None:
        copy.copy_(updated)


operator(
    "fused_adamw_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) average, Tensor(c!) square, Tensor(d!)? copy, "
    "float lr, float beta1, float beta2, float eps, float weight_decay, int step) -> ()",
    fake=lambda *arguments: None,
    triton="pointwise.triton_pointwise.adamw",
    mutates=("parameter", "average", "square", "copy"),
)(adamw_reference)
