"""AdaGrad (Duchi et al. 2011).

With gradient g, into which decay · w is added first::

    s ← s + g²
    w ← w - lr · g / (sqrt(s) + eps)

RMSProp (Tieleman & Hinton 2012, lecture 6e).

With gradient g, into which decay · w is added first::

    v ← β₂ v + (1 - β₂) g²
    w ← w - lr · g / (sqrt(v) + eps)
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from napkin.optim.base import Group, Optimizer, UpdateRule, decayed, decayed_foreach, step_tensors
from napkin.optim.saved_state import TorchTwin

# torch keeps its foreach and fused functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false


def _update(parameter: Tensor, gradient: Tensor, total: Tensor, group: Group) -> None:
    gradient = decayed(gradient, parameter, group)
    total.addcmul_(gradient, gradient)
    parameter.addcdiv_(gradient, total.sqrt().add_(group["eps"]), value=-group["lr"])


def _update_foreach(parameters: list[Tensor], gradients: list[Tensor], totals: list[Tensor], group: Group) -> None:
    gradients = decayed_foreach(gradients, parameters, group)
    torch._foreach_addcmul_(totals, gradients, gradients)
    denominators = torch._foreach_sqrt(totals)
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(parameters, gradients, denominators, -group["lr"])


def _update_fused(parameters: list[Tensor], gradients: list[Tensor], totals: list[Tensor], group: Group) -> None:
    torch._fused_adagrad_(
        parameters,
        gradients,
        totals,
        step_tensors(group, parameters),
        lr=group["lr"],
        lr_decay=0.0,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class AdaGrad(Optimizer):
    """Steps shrink as the squared gradients add up, for each number by itself, and never grow again.

    State: "sum" in the parameter's shape, 4 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("sum",)
    rule = UpdateRule(_update, _update_foreach, _update_fused)
    twin = TorchTwin("Adagrad", fixed={"lr_decay": (0,)}, optional={"maximize": (False,)})

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        lr: float = 0.01,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        foreach: bool = True,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, foreach=foreach, fused=fused)


# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false


def _rmsprop_update(parameter: Tensor, gradient: Tensor, square: Tensor, group: Group) -> None:
    gradient = decayed(gradient, parameter, group)
    square.mul_(group["beta2"]).addcmul_(gradient, gradient, value=1 - group["beta2"])
    parameter.addcdiv_(gradient, square.sqrt().add_(group["eps"]), value=-group["lr"])


def _rmsprop_update_foreach(
    parameters: list[Tensor], gradients: list[Tensor], squares: list[Tensor], group: Group
) -> None:
    gradients = decayed_foreach(gradients, parameters, group)
    torch._foreach_mul_(squares, group["beta2"])
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["beta2"])
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(parameters, gradients, denominators, -group["lr"])


class RMSProp(Optimizer):
    """AdaGrad that forgets: the squares are averaged over about 1 / (1 - β₂) steps instead of summed over all.

    State: "square_avg" in the parameter's shape, 4 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("square_avg",)
    rule = UpdateRule(_rmsprop_update, _rmsprop_update_foreach)
    twin = TorchTwin(
        "RMSprop",
        renamed={"alpha": "beta2"},
        fixed={"momentum": (0,), "centered": (False,)},
        optional={"maximize": (False,)},
    )

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        lr: float = 1e-3,
        beta2: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        foreach: bool = True,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, foreach=foreach, fused=fused)
