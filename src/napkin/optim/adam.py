"""Adam (Kingma & Ba 2015).

With gradient g, into which decay · w is added first, and step t counted from 1::

    m ← β₁ m + (1 - β₁) g
    v ← β₂ v + (1 - β₂) g²
    w ← w - lr · (m / (1 - β₁ᵗ)) / (sqrt(v / (1 - β₂ᵗ)) + eps)
"""

# torch keeps its foreach and fused functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable

import torch
from torch import Tensor

from napkin.optim.adamw import corrected
from napkin.optim.base import Forms, Group, Optimizer, counted
from napkin.optim.decay import decayed, decayed_foreach


def _update(parameter: Tensor, gradient: Tensor, average: Tensor, square: Tensor, group: Group) -> None:
    beta1, beta2 = group["betas"]
    step_size, eps = corrected(group)
    gradient = decayed(gradient, parameter, group)
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    parameter.addcdiv_(average, square.sqrt().add_(eps), value=-step_size)


def _update_foreach(
    parameters: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor], group: Group
) -> None:
    beta1, beta2 = group["betas"]
    step_size, eps = corrected(group)
    gradients = decayed_foreach(gradients, parameters, group)
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(parameters, averages, denominators, -step_size)


def _update_fused(
    parameters: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor], group: Group
) -> None:
    beta1, beta2 = group["betas"]
    torch._fused_adam_(
        parameters,
        gradients,
        averages,
        squares,
        [],
        counted(group, parameters),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


class Adam(Optimizer):
    """Momentum over RMSProp, both averages corrected for their start at zero.

    State: "exp_avg" and "exp_avg_sq" in the parameter's shape, 8 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    forms = Forms(_update, _update_foreach, _update_fused)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        foreach: bool = True,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, foreach=foreach, fused=fused)
