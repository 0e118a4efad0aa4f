"""AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019): Adam with its decay decoupled from the gradient.

With Adam's update u of the bare gradient::

    w ← (1 - lr · decay) w - lr · u
"""

# torch keeps its foreach and fused functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from napkin.kernels.fused_update import fused_adamw_
from napkin.optim.adam import Adam, adam_update, adam_update_foreach, adam_update_fused
from napkin.optim.base import Group, UpdateRule
from napkin.optim.saved_state import TorchTwin


def _update(parameter: Tensor, gradient: Tensor, average: Tensor, square: Tensor, group: Group) -> None:
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    adam_update(parameter, gradient, average, square, group)


def _update_foreach(parameters: list[Tensor], gradients: list[Tensor], *state_and_group: Any) -> None:
    group = state_and_group[-1]
    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    adam_update_foreach(parameters, gradients, *state_and_group)


def _update_fused(*lists_and_group: Any) -> None:
    adam_update_fused(torch._fused_adamw_, *lists_and_group)


def _update_copying(
    parameter: Tensor, gradient: Tensor, average: Tensor, square: Tensor, copy: Tensor, group: Group
) -> None:
    settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "step")}
    fused_adamw_(parameter, gradient.contiguous(), average, square, copy=copy, **settings)


class AdamW(Adam):
    """Adam with decoupled weight decay.

    State: "exp_avg" and "exp_avg_sq" in the parameter's shape, 8 bytes per parameter. See `Optimizer` for the rest.
    """

    rule = UpdateRule(_update, _update_foreach, _update_fused, _update_copying)
    twin = TorchTwin(
        "AdamW", fixed={"amsgrad": (False,)}, optional={"maximize": (False,), "decoupled_weight_decay": (True,)}
    )

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        foreach: bool = True,
        fused: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=foreach, fused=fused)
