"""Adam (Kingma & Ba 2015), and the update that it shares with AdamW.

With gradient g, into which decay · w is added first, and step t counted from 1::

    m ← β₁ m + (1 - β₁) g
    v ← β₂ v + (1 - β₂) g²
    w ← w - lr · (m / (1 - β₁ᵗ)) / (sqrt(v / (1 - β₂ᵗ)) + eps)

AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019): Adam with its decay decoupled from the gradient.

With Adam's update u of the bare gradient::

    w ← (1 - lr · decay) w - lr · u
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from napkin.kernels.pointwise.adamw import fused_adamw_
from napkin.optim.base import Group, Optimizer, UpdateRule, decayed, decayed_foreach, step_tensors
from napkin.optim.saved_state import TorchTwin

# torch keeps its foreach and fused functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false


def adam_update(parameter: Tensor, gradient: Tensor, average: Tensor, square: Tensor, group: Group) -> None:
    """The three lines above, without decay."""
    beta1, beta2 = group["betas"]
    step_size, eps = _bias_corrected(group)
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    parameter.addcdiv_(average, square.sqrt().add_(eps), value=-step_size)


def adam_update_foreach(
    parameters: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor], group: Group
) -> None:
    """`adam_update` for lists."""
    beta1, beta2 = group["betas"]
    step_size, eps = _bias_corrected(group)
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(parameters, averages, denominators, -step_size)


def adam_update_fused(
    kernel: Callable[..., None],
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    group: Group,
) -> None:
    """`adam_update_foreach` by a kernel of torch, decay included."""
    beta1, beta2 = group["betas"]
    kernel(
        parameters,
        gradients,
        averages,
        squares,
        [],
        step_tensors(group, parameters),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def _bias_corrected(group: Group) -> tuple[float, float]:
    """Step size and eps with both bias corrections folded into them (Kingma & Ba, section 2).

    lr / c₁ · m / (sqrt(v / c₂) + eps) = (lr · sqrt(c₂) / c₁) · m / (sqrt(v) + eps · sqrt(c₂)): one pass less.
    """
    beta1, beta2 = group["betas"]
    correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
    return group["lr"] * correction2**0.5 / correction1, group["eps"] * correction2**0.5


def _update(parameter: Tensor, gradient: Tensor, average: Tensor, square: Tensor, group: Group) -> None:
    adam_update(parameter, decayed(gradient, parameter, group), average, square, group)


def _update_foreach(parameters: list[Tensor], gradients: list[Tensor], *state_and_group: Any) -> None:
    adam_update_foreach(parameters, decayed_foreach(gradients, parameters, state_and_group[-1]), *state_and_group)


def _update_fused(*lists_and_group: Any) -> None:
    adam_update_fused(torch._fused_adam_, *lists_and_group)


class Adam(Optimizer):
    """Momentum over RMSProp, both averages corrected for their start at zero.

    State: "exp_avg" and "exp_avg_sq" in the parameter's shape, 8 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    rule = UpdateRule(_update, _update_foreach, _update_fused)
    twin = TorchTwin(
        "Adam", fixed={"amsgrad": (False,)}, optional={"maximize": (False,), "decoupled_weight_decay": (False,)}
    )

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


# torch keeps its foreach and fused functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false


def _adamw_update(parameter: Tensor, gradient: Tensor, average: Tensor, square: Tensor, group: Group) -> None:
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    adam_update(parameter, gradient, average, square, group)


def _adamw_update_foreach(parameters: list[Tensor], gradients: list[Tensor], *state_and_group: Any) -> None:
    group = state_and_group[-1]
    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    adam_update_foreach(parameters, gradients, *state_and_group)


def _adamw_update_fused(*lists_and_group: Any) -> None:
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

    rule = UpdateRule(_adamw_update, _adamw_update_foreach, _adamw_update_fused, _update_copying)
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
