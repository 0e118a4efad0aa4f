"""Lion (Chen et al. 2023, algorithm 2).

With gradient g::

    d ← sign(β₁ m + (1 - β₁) g)
    w ← (1 - lr · decay) w - lr · d
    m ← β₂ m + (1 - β₂) g
"""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable

import torch
from torch import Tensor

from napkin.optim.base import Group, Optimizer, UpdateRule


def _update(parameter: Tensor, gradient: Tensor, average: Tensor, group: Group) -> None:
    beta1, beta2 = group["betas"]
    direction = average.lerp(gradient, 1 - beta1).sign_()
    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
    average.lerp_(gradient, 1 - beta2)


def _update_foreach(parameters: list[Tensor], gradients: list[Tensor], averages: list[Tensor], group: Group) -> None:
    beta1, beta2 = group["betas"]
    directions = torch._foreach_lerp(averages, gradients, 1 - beta1)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(parameters, directions, alpha=-group["lr"])
    torch._foreach_lerp_(averages, gradients, 1 - beta2)


class Lion(Optimizer):
    """Every number moves by lr, in the direction of the sign of an average.

    A step is several times as long as AdamW's, so it needs a learning rate 3 to 10 times smaller and a decay larger by
    the same factor.

    State: "exp_avg" in the parameter's shape, 4 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("exp_avg",)
    rule = UpdateRule(_update, _update_foreach)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 1.0,
        foreach: bool = True,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, foreach=foreach, fused=fused)
