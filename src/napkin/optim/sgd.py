"""Stochastic gradient descent (Robbins & Monro 1951), with momentum (Polyak 1964), with Nesterov's (1983), and Lion.

With gradient g, into which all but Lion add decay · w first::

    SGD        w ← w - lr · g
    momentum   b ← momentum · b + g;   w ← w - lr · b
    Nesterov   b ← momentum · b + g;   w ← w - lr · (g + momentum · b)
    Lion       d ← sign(β₁ m + (1 - β₁) g);   w ← (1 - lr · decay) w - lr · d;   m ← β₂ m + (1 - β₂) g

Nesterov's is written as by Sutskever et al. 2013, which looks ahead without moving the parameters there and back; Lion
is algorithm 2 of Chen et al. 2023.
"""

# torch keeps its foreach and fused functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from napkin.optim.base import Form, Group, Optimizer, Parameters, UpdateRule, decayed, decayed_foreach
from napkin.optim.saved_state import TorchTwin

Tensors = list[Tensor]


def _sgd(parameter: Tensor, gradient: Tensor, group: Group) -> None:
    parameter.add_(decayed(gradient, parameter, group), alpha=-group["lr"])


def _sgd_foreach(parameters: Tensors, gradients: Tensors, group: Group) -> None:
    torch._foreach_add_(parameters, decayed_foreach(gradients, parameters, group), alpha=-group["lr"])


def _momentum(parameter: Tensor, gradient: Tensor, buffer: Tensor, group: Group, *, nesterov: bool) -> None:
    gradient = decayed(gradient, parameter, group)
    buffer.mul_(group["momentum"]).add_(gradient)
    direction = gradient.add(buffer, alpha=group["momentum"]) if nesterov else buffer
    parameter.add_(direction, alpha=-group["lr"])


def _momentum_foreach(
    parameters: Tensors, gradients: Tensors, buffers: Tensors, group: Group, *, nesterov: bool
) -> None:
    gradients = decayed_foreach(gradients, parameters, group)
    torch._foreach_mul_(buffers, group["momentum"])
    torch._foreach_add_(buffers, gradients)
    directions = torch._foreach_add(gradients, buffers, alpha=group["momentum"]) if nesterov else buffers
    torch._foreach_add_(parameters, directions, alpha=-group["lr"])


def _fused(parameters: Tensors, gradients: Tensors, *buffers_and_group: Any, nesterov: bool = False) -> None:
    *buffers, group = buffers_and_group
    torch._fused_sgd_(
        parameters,
        gradients,
        *(buffers or [[]]),
        weight_decay=group["weight_decay"],
        momentum=group.get("momentum", 0.0),
        lr=group["lr"],
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        # With a buffer of zeros the rule itself handles the first gradient.
        is_first_step=False,
    )


def _torch_sgd(*, nesterov: bool = False, **fixed: tuple[Any, ...]) -> TorchTwin:
    settings = {"dampening": (0,), **fixed, "nesterov": (nesterov,)}
    return TorchTwin("SGD", fixed=settings, optional={"maximize": (False,)})


class SGD(Optimizer):
    """Plain stochastic gradient descent.

    State: none, 0 bytes per parameter. See `Optimizer` for the rest.
    """

    rule = UpdateRule(_sgd, _sgd_foreach, _fused)
    twin = _torch_sgd(momentum=(0,))

    def __init__(self, params: Parameters, *, lr: float = 0.1, weight_decay: float = 0.0, **form: Unpack[Form]) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, **form)


class Momentum(Optimizer):
    """SGD along a running sum of gradients, in which the gradient of k steps ago has the weight momentum^k.

    State: "momentum_buffer" in the parameter's shape, 4 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("momentum_buffer",)
    rule = UpdateRule(*(partial(form, nesterov=False) for form in (_momentum, _momentum_foreach, _fused)))
    twin = _torch_sgd()

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        **form: Unpack[Form],
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, **form)


class Nesterov(Momentum):
    """Momentum, with the gradient step taken from where the momentum would lead.

    State: "momentum_buffer" in the parameter's shape, 4 bytes per parameter. See `Optimizer` for the rest.
    """

    rule = UpdateRule(*(partial(form, nesterov=True) for form in (_momentum, _momentum_foreach, _fused)))
    twin = _torch_sgd(nesterov=True)


def _lion(parameter: Tensor, gradient: Tensor, average: Tensor, group: Group) -> None:
    beta1, beta2 = group["betas"]
    direction = average.lerp(gradient, 1 - beta1).sign_()
    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
    average.lerp_(gradient, 1 - beta2)


def _lion_foreach(parameters: Tensors, gradients: Tensors, averages: Tensors, group: Group) -> None:
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
    rule = UpdateRule(_lion, _lion_foreach)

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 1.0,
        **form: Unpack[Form],
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **form)
