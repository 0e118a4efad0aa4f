"""Stochastic gradient descent (Robbins & Monro 1951), with momentum (Polyak 1964) and with Nesterov's (1983).

With gradient g, into which decay · w is added first::

    SGD        w ← w - lr · g
    momentum   b ← momentum · b + g;   w ← w - lr · b
    Nesterov   b ← momentum · b + g;   w ← w - lr · (g + momentum · b)

Nesterov's is written as by Sutskever et al. 2013, which looks ahead without moving the parameters there and back.

Lion (Chen et al. 2023, algorithm 2).

With gradient g::

    d ← sign(β₁ m + (1 - β₁) g)
    w ← (1 - lr · decay) w - lr · d
    m ← β₂ m + (1 - β₂) g
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from napkin.optim.base import Group, Optimizer, UpdateRule, decayed, decayed_foreach
from napkin.optim.saved_state import TorchTwin

# torch keeps its foreach and fused functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false


def _sgd(parameter: Tensor, gradient: Tensor, group: Group) -> None:
    parameter.add_(decayed(gradient, parameter, group), alpha=-group["lr"])


def _sgd_foreach(parameters: list[Tensor], gradients: list[Tensor], group: Group) -> None:
    torch._foreach_add_(parameters, decayed_foreach(gradients, parameters, group), alpha=-group["lr"])


def _sgd_fused(parameters: list[Tensor], gradients: list[Tensor], group: Group) -> None:
    _fused(parameters, gradients, [], group, momentum=0.0, nesterov=False)


def _momentum(parameter: Tensor, gradient: Tensor, buffer: Tensor, group: Group) -> None:
    buffer.mul_(group["momentum"]).add_(decayed(gradient, parameter, group))
    parameter.add_(buffer, alpha=-group["lr"])


def _momentum_foreach(parameters: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], group: Group) -> None:
    torch._foreach_mul_(buffers, group["momentum"])
    torch._foreach_add_(buffers, decayed_foreach(gradients, parameters, group))
    torch._foreach_add_(parameters, buffers, alpha=-group["lr"])


def _momentum_fused(parameters: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], group: Group) -> None:
    _fused(parameters, gradients, buffers, group, momentum=group["momentum"], nesterov=False)


def _nesterov(parameter: Tensor, gradient: Tensor, buffer: Tensor, group: Group) -> None:
    gradient = decayed(gradient, parameter, group)
    buffer.mul_(group["momentum"]).add_(gradient)
    parameter.add_(gradient.add(buffer, alpha=group["momentum"]), alpha=-group["lr"])


def _nesterov_foreach(parameters: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], group: Group) -> None:
    gradients = decayed_foreach(gradients, parameters, group)
    torch._foreach_mul_(buffers, group["momentum"])
    torch._foreach_add_(buffers, gradients)
    ahead = torch._foreach_add(gradients, buffers, alpha=group["momentum"])
    torch._foreach_add_(parameters, ahead, alpha=-group["lr"])


def _nesterov_fused(parameters: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], group: Group) -> None:
    _fused(parameters, gradients, buffers, group, momentum=group["momentum"], nesterov=True)


def _fused(
    parameters: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    group: Group,
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    torch._fused_sgd_(
        parameters,
        gradients,
        buffers,
        weight_decay=group["weight_decay"],
        momentum=momentum,
        lr=group["lr"],
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        # With a buffer of zeros the rule itself handles the first gradient.
        is_first_step=False,
    )


_UNDAMPED = {"dampening": (0,)}
_NOT_MAXIMIZED = {"maximize": (False,)}


class SGD(Optimizer):
    """Plain stochastic gradient descent.

    State: none, 0 bytes per parameter. See `Optimizer` for the rest.
    """

    rule = UpdateRule(_sgd, _sgd_foreach, _sgd_fused)
    twin = TorchTwin("SGD", fixed={**_UNDAMPED, "momentum": (0,), "nesterov": (False,)}, optional=_NOT_MAXIMIZED)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        lr: float = 0.1,
        weight_decay: float = 0.0,
        foreach: bool = True,
        fused: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, foreach=foreach, fused=fused)


class Momentum(Optimizer):
    """SGD along a running sum of gradients, in which the gradient of k steps ago has the weight momentum^k.

    State: "momentum_buffer" in the parameter's shape, 4 bytes per parameter. See `Optimizer` for the rest.
    """

    state_names = ("momentum_buffer",)
    rule = UpdateRule(_momentum, _momentum_foreach, _momentum_fused)
    twin = TorchTwin("SGD", fixed={**_UNDAMPED, "nesterov": (False,)}, optional=_NOT_MAXIMIZED)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        foreach: bool = True,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, foreach=foreach, fused=fused)


class Nesterov(Momentum):
    """Momentum, with the gradient step taken from where the momentum would lead.

    State: "momentum_buffer" in the parameter's shape, 4 bytes per parameter. See `Optimizer` for the rest.
    """

    rule = UpdateRule(_nesterov, _nesterov_foreach, _nesterov_fused)
    twin = TorchTwin("SGD", fixed={**_UNDAMPED, "nesterov": (True,)}, optional=_NOT_MAXIMIZED)


# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false


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
