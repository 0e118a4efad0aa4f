"""AdaGrad (Duchi et al. 2011).

With gradient g, into which decay · w is added first::

    s ← s + g²
    w ← w - lr · g / (sqrt(s) + eps)
"""

# torch keeps its foreach and fused functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable

import torch
from torch import Tensor

from napkin.optim.base import Group, Optimizer, UpdateRule, step_tensors
from napkin.optim.saved_state import TorchTwin
from napkin.optim.weight_decay import decayed, decayed_foreach


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
