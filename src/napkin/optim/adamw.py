"""AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019).

With gradient g, step t counted from 1, and decay decoupled from the gradient::

    m ← β₁ m + (1 - β₁) g
    v ← β₂ v + (1 - β₂) g²
    w ← (1 - lr · decay) w - lr · (m / (1 - β₁ᵗ)) / (sqrt(v / (1 - β₂ᵗ)) + eps)
"""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from napkin.errors import NapkinError

_BUCKET_NUMEL = 2**20
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay.

    State: `state[parameter]` holds the tensors "exp_avg" and "exp_avg_sq" in the parameter's shape, 8 bytes a
    parameter: they are fp32 whatever the parameter's dtype, because a bf16 average stops moving once its updates
    fall below its resolution. They are born at the first step with a gradient. `group["step"]` is the number of
    steps taken, a Python int: exact after a restart, stored with the group's other numbers, and never a reason
    to wait for a GPU. It counts for the whole group; a parameter without a gradient sits the step out.

    A step needs 4 bytes a number of temporary memory, for one bucket at a time: as many whole tensors as hold
    2^20 numbers together, or one that is larger alone. Gradients and parameters narrower than fp32 are widened
    bucket by bucket, 4 bytes more each. `foreach=False` updates tensor by tensor, with the same numbers.

    The learning rate is read from `group["lr"]` at each step: a schedule writes it there.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        foreach: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        super().__init__(params, defaults)
        self.foreach = foreach
        for group in self.param_groups:
            _refuse_impossible(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; with a closure, call it first and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update = _update_foreach if self.foreach else _update_one_by_one
        for group in self.param_groups:
            group["step"] += 1
            for parameters in _buckets(p for p in group["params"] if p.grad is not None):
                self._update_bucket(parameters, group, update)
        return loss

    def _update_bucket(self, parameters: list[Tensor], group: dict[str, Any], update: Callable[..., None]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {name: _moment_like(parameter) for name in _MOMENTS}
        # `.to` copies nothing that is wide already, so in fp32 these are the parameters and gradients themselves.
        wide = [p.to(_wide(p)) for p in parameters]
        gradients = [p.grad.to(_wide(p)) for p in parameters if p.grad is not None]
        averages, squares = ([self.state[p][name] for p in parameters] for name in _MOMENTS)
        update(wide, gradients, averages, squares, **_step_constants(group))
        for parameter, updated in zip(parameters, wide, strict=True):
            if updated is not parameter:
                parameter.copy_(updated)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over state and settings of another optimizer over the same parameters, in the same order."""
        super().load_state_dict(state_dict)
        # The base class has cast the moments to the parameters' dtypes.
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            p = parameters[index]
            self.state[p] = {name: saved[name].to(p.device, _wide(p), copy=True) for name in _MOMENTS}


def _step_constants(group: dict[str, Any]) -> dict[str, float]:
    """The step's numbers, with both bias corrections folded into step size and eps (Kingma & Ba, section 2).

    lr / c₁ · m / (sqrt(v / c₂) + eps) = (lr · sqrt(c₂) / c₁) · m / (sqrt(v) + eps · sqrt(c₂)): one pass less.
    """
    beta1, beta2 = group["betas"]
    correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
    return {
        "keep": 1 - group["lr"] * group["weight_decay"],
        "beta1": beta1,
        "beta2": beta2,
        "step_size": group["lr"] * correction2**0.5 / correction1,
        "eps": group["eps"] * correction2**0.5,
    }


def _update_one_by_one(
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    *,
    keep: float,
    beta1: float,
    beta2: float,
    step_size: float,
    eps: float,
) -> None:
    """The update as one would write it: the specification of the foreach form."""
    for parameter, gradient, average, square in zip(parameters, gradients, averages, squares, strict=True):
        parameter.mul_(keep)
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        parameter.addcdiv_(average, square.sqrt().add_(eps), value=-step_size)


def _update_foreach(
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    *,
    keep: float,
    beta1: float,
    beta2: float,
    step_size: float,
    eps: float,
) -> None:
    """The same, each operation once for all tensors: on a GPU one launch instead of one a tensor."""
    torch._foreach_mul_(parameters, keep)
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(parameters, averages, denominators, -step_size)


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of parameters of at most _BUCKET_NUMEL numbers, or of one parameter.

    A bucket bounds the temporary memory, and keeps what a CPU reads seven times over in its cache: 4.3 million
    parameters take 7 ms so and 12 ms at once.
    """
    bucket: list[Tensor] = []
    numel = 0
    for parameter in parameters:
        if bucket and numel + parameter.numel() > _BUCKET_NUMEL:
            yield bucket
            bucket, numel = [], 0
        bucket.append(parameter)
        numel += parameter.numel()
    if bucket:
        yield bucket


def _moment_like(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=_wide(parameter))


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _refuse_impossible(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise NapkinError(f"{name} is {group[name]}: use 0 or more")
    for beta in group["betas"]:
        if not 0 <= beta < 1:
            raise NapkinError(f"betas are {group['betas']}: use two numbers from 0 to below 1")
