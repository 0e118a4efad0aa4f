"""Rules that divide each number's step by the size of its gradients: AdaGrad, RMSProp, Adam and AdamW.

With gradient g, into which all but AdamW add decay · w first, and step t counted from 1::

    AdaGrad (Duchi et al. 2011)             s ← s + g²
                                            w ← w - lr · g / (sqrt(s) + eps)
    RMSProp (Tieleman & Hinton 2012, 6e)    v ← β₂ v + (1 - β₂) g²
                                            w ← w - lr · g / (sqrt(v) + eps)
    Adam (Kingma & Ba 2015)                 m ← β₁ m + (1 - β₁) g
                                            v ← β₂ v + (1 - β₂) g²
                                            w ← w - lr · (m / (1 - β₁ᵗ)) / (sqrt(v / (1 - β₂ᵗ)) + eps)
    AdamW (Loshchilov & Hutter 2019)        w ← (1 - lr · decay) w, then Adam's step of the bare gradient
"""

# torch keeps its foreach and fused functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from napkin.kernels.pointwise.adamw import fused_adamw_
from napkin.optim.base import Form, Group, Optimizer, Parameters, UpdateRule, decayed, decayed_foreach
from napkin.optim.saved_state import TorchTwin

Tensors = list[Tensor]


def _adagrad(parameter: Tensor, gradient: Tensor, total: Tensor, group: Group) -> None:
    gradient = decayed(gradient, parameter, group)
    total.addcmul_(gradient, gradient)
    parameter.addcdiv_(gradient, total.sqrt().add_(group["eps"]), value=-group["lr"])


def _adagrad_foreach(parameters: Tensors, gradients: Tensors, totals: Tensors, group: Group) -> None:
    gradients = decayed_foreach(gradients, parameters, group)
    torch._foreach_addcmul_(totals, gradients, gradients)
    _step_foreach(parameters, gradients, totals, group["lr"], group["eps"])


def _adagrad_fused(parameters: Tensors, gradients: Tensors, totals: Tensors, group: Group) -> None:
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    torch._fused_adagrad_(
        parameters, gradients, totals, _step_tensors(group, parameters), lr_decay=0.0, maximize=False, **settings
    )


class AdaGrad(Optimizer):
    """Steps shrink as the squared gradients add up, for each number by itself, and never grow again.

    State: "sum" in the parameter's shape, 4 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("sum",)
    rule = UpdateRule(_adagrad, _adagrad_foreach, _adagrad_fused)
    twin = TorchTwin("Adagrad", fixed={"lr_decay": (0,)}, optional={"maximize": (False,)})

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 0.01,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        **form: Unpack[Form],
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, **form)


def _rmsprop(parameter: Tensor, gradient: Tensor, square: Tensor, group: Group) -> None:
    gradient = decayed(gradient, parameter, group)
    square.mul_(group["beta2"]).addcmul_(gradient, gradient, value=1 - group["beta2"])
    parameter.addcdiv_(gradient, square.sqrt().add_(group["eps"]), value=-group["lr"])


def _rmsprop_foreach(parameters: Tensors, gradients: Tensors, squares: Tensors, group: Group) -> None:
    gradients = decayed_foreach(gradients, parameters, group)
    torch._foreach_mul_(squares, group["beta2"])
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["beta2"])
    _step_foreach(parameters, gradients, squares, group["lr"], group["eps"])


class RMSProp(Optimizer):
    """AdaGrad that forgets: the squares are averaged over about 1 / (1 - β₂) steps instead of summed over all.

    State: "square_avg" in the parameter's shape, 4 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("square_avg",)
    rule = UpdateRule(_rmsprop, _rmsprop_foreach)
    twin = TorchTwin(
        "RMSprop",
        renamed={"alpha": "beta2"},
        fixed={"momentum": (0,), "centered": (False,)},
        optional={"maximize": (False,)},
    )

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 1e-3,
        beta2: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **form: Unpack[Form],
    ) -> None:
        super().__init__(params, {"lr": lr, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}, **form)


def _adam(
    parameter: Tensor, gradient: Tensor, average: Tensor, square: Tensor, group: Group, *, decoupled: bool
) -> None:
    if decoupled:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
    else:
        gradient = decayed(gradient, parameter, group)
    beta1, beta2 = group["betas"]
    step_size, eps = _bias_corrected(group)
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    parameter.addcdiv_(average, square.sqrt().add_(eps), value=-step_size)


def _adam_foreach(
    parameters: Tensors, gradients: Tensors, averages: Tensors, squares: Tensors, group: Group, *, decoupled: bool
) -> None:
    if decoupled:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    else:
        gradients = decayed_foreach(gradients, parameters, group)
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    _step_foreach(parameters, averages, squares, *_bias_corrected(group))


def _adam_fused(parameters: Tensors, *lists_and_group: Any, decoupled: bool) -> None:
    *lists, group = lists_and_group
    (beta1, beta2), steps = group["betas"], _step_tensors(group, parameters)
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    kernel(parameters, *lists, [], steps, beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, **settings)


def _adamw_copying(parameters: Tensors, gradients: Tensors, *lists: Any) -> None:
    averages, squares, copies, factor, group = lists
    settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "step")}
    gradients = [gradient.contiguous() for gradient in gradients]
    fused_adamw_(parameters, gradients, averages, squares, copies=copies, factor=factor, **settings)


def _bias_corrected(group: Group) -> tuple[float, float]:
    """Step size and eps with both bias corrections folded into them (Kingma & Ba, section 2).

    lr / c₁ · m / (sqrt(v / c₂) + eps) = (lr · sqrt(c₂) / c₁) · m / (sqrt(v) + eps · sqrt(c₂)): one pass less.
    """
    beta1, beta2 = group["betas"]
    correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
    return group["lr"] * correction2**0.5 / correction1, group["eps"] * correction2**0.5


def _step_foreach(parameters: Tensors, directions: Tensors, squares: Tensors, step_size: float, eps: float) -> None:
    """w ← w - step_size · direction / (sqrt(square) + eps)."""
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(parameters, directions, denominators, -step_size)


def _step_tensors(group: Group, parameters: Tensors) -> Tensors:
    """The group's step as the fused kernels take it: one tensor of one number per parameter."""
    return [torch.full((), float(group["step"]), device=parameters[0].device)] * len(parameters)


class Adam(Optimizer):
    """Momentum over RMSProp, both averages corrected for their start at zero.

    State: "exp_avg" and "exp_avg_sq" in the parameter's shape, 8 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    rule = UpdateRule(*(partial(form, decoupled=False) for form in (_adam, _adam_foreach, _adam_fused)))
    twin = TorchTwin(
        "Adam", fixed={"amsgrad": (False,)}, optional={"maximize": (False,), "decoupled_weight_decay": (False,)}
    )

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **form: Unpack[Form],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **form)


class AdamW(Adam):
    """Adam with decoupled weight decay.

    State: "exp_avg" and "exp_avg_sq" in the parameter's shape, 8 bytes per parameter. See `Optimizer` for the rest.
    """

    rule = UpdateRule(
        partial(_adam, decoupled=True),
        partial(_adam_foreach, decoupled=True),
        partial(_adam_fused, decoupled=True),
        copying=_adamw_copying,
    )
    twin = TorchTwin(
        "AdamW", fixed={"amsgrad": (False,)}, optional={"maximize": (False,), "decoupled_weight_decay": (True,)}
    )

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        **form: Unpack[Form],
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **form)
