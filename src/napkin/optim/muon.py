"""Muon (Jordan et al. 2024), at AdamW's step length (Liu et al. 2025, "Muon is Scalable for LLM Training").

With gradient g of an m × n matrix::

    b ← momentum · b + (1 - momentum) g
    u ← orthogonalised((1 - momentum) g + momentum · b)
    w ← (1 - lr · decay) w - lr · 0.2 sqrt(max(m, n)) · u

Orthogonalised is U Vᵀ for a matrix U S Vᵀ: the step is equally long in all directions. The Newton-Schulz iteration
approximates it with matrix products alone::

    x ← a x + (b x xᵀ + c (x xᵀ)²) x
"""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

import functools
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.optim.adam import AdamW
from napkin.optim.base import Form, Group, Optimizer, Parameters, UpdateRule, buckets, muon_groups, zeros_wide
from napkin.optim.saved_state import TorchTwin, full_tensor, is_divided, part_like, same_division

# Jordan's coefficients: the steepest at 0 of those that lead to singular values near 1 (0.7 to 1.2) in five steps.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_TINY = 1e-7


def newton_schulz(matrix: Float[Tensor, "... m n"]) -> Float[Tensor, "... m n"]:
    """The matrix with its singular values brought near 1, in its own dtype: five steps of the iteration.

    2·k·(2·m²·n + m³) FLOPs per iteration for k matrices with m ≤ n; a tall matrix is transposed first.
    """
    if matrix.shape[-2] > matrix.shape[-1]:
        return newton_schulz(matrix.mT).mT
    # No singular value exceeds the norm.
    x = matrix / torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True).clamp_(min=_TINY)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    return x


def newton_schulz_stacked(matrices: Float[Tensor, "k m n"]) -> Float[Tensor, "k m n"]:
    """The iteration of `newton_schulz` for a stack, with sums fused into the products; overwrites its input."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return newton_schulz_stacked(matrices.mT).mT
    x = matrices.div_(torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp_(min=_TINY))
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return x


def _update(parameter: Tensor, gradient: Tensor, buffer: Tensor, group: Group) -> None:
    buffer.lerp_(gradient, 1 - group["momentum"])
    direction = newton_schulz(gradient.lerp(buffer, group["momentum"]).to(group["products"]))
    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-_step_length(direction, group))


def _update_foreach(
    parameters: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    group: Group,
    sharded: list[Tensor] | None = None,
) -> None:
    """Update matrices of one shape: the iteration runs on a stack of them.

    If the lists hold the local parts of `sharded` matrices, each rank orthogonalises whole matrices and takes its part.
    """
    torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
    ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
    ahead = [matrix.to(group["products"]) for matrix in ahead]
    if sharded is not None:
        ahead = list(map(full_tensor, sharded, ahead))
    stack = torch.stack(ahead)
    del ahead
    directions = newton_schulz_stacked(stack.flatten(0, -3)).unflatten(0, stack.shape[:-2])
    here = list(directions.unbind())
    if sharded is not None:
        here = list(map(part_like, sharded, here))
    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(parameters, here, alpha=-_step_length(directions, group))


def _step_length(direction: Tensor, group: Group) -> float:
    """An orthogonal m × n matrix has a root mean square of 1 / sqrt(max(m, n)), AdamW's updates one of about 0.2."""
    return group["lr"] * 0.2 * max(direction.shape[-2:]) ** 0.5


_MUON = UpdateRule(_update, _update_foreach)


class Muon(Optimizer):
    """Orthogonalised momentum for the matrices inside the blocks; AdamW for embeddings, head and vectors.

    AdamW updates the groups whose "orthogonal" is False, and vectors in the others. `muon_groups` makes both kinds from
    a model. Their steps are of similar size, so one learning rate and one decay serve for both. A parameter with more
    than two dimensions is a stack of matrices, which the last two dimensions are.

    `products` is the dtype of the matrix products of the iteration; bf16 is enough where the hardware multiplies it
    natively. `fused=True` applies to the part that AdamW updates.

    State: "momentum_buffer" in the matrix's shape, 4 bytes per parameter of the blocks; "exp_avg" and "exp_avg_sq", 8
    bytes per parameter of the others. See `Optimizer` for the rest; a bucket holds matrices of one shape. Its temporary
    memory: up to three times the bucket and three times its Gram matrices, in the products' dtype.

    Of sharded matrices the momentum is gathered a bucket at a time, in the products' dtype, and every rank
    orthogonalises all of them: the temporary memory and the FLOPs are those of whole matrices.
    """

    rule = AdamW.rule
    # For matrices alone, since torch's Muon takes nothing else. Its eps keeps a norm from being 0, ours is AdamW's.
    twin = TorchTwin(
        "Muon",
        fixed={
            "adjust_lr_fn": ("match_rms_adamw",),
            "nesterov": (True,),
            "ns_coefficients": ((_A, _B, _C),),
            "ns_steps": (_STEPS,),
            "eps": (_TINY,),
        },
    )

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        products: torch.dtype = torch.float32,
        **form: Unpack[Form],
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "products": products}
        defaults |= {"weight_decay": weight_decay, "orthogonal": True}
        super().__init__(params, defaults, **form)
        if not products.is_floating_point:
            raise NapkinError(f"products is {products}: use a floating-point dtype, torch.float32 or torch.bfloat16")

    @classmethod
    def for_model(cls, model: nn.Module, *, weight_decay: float, products: torch.dtype, **settings: Any) -> Optimizer:
        """Muon for the matrices of the blocks, AdamW for the rest."""
        return cls(muon_groups(model, weight_decay), products=products, **settings)

    def update_group(self, parameters: list[Tensor], group: Group) -> None:
        """Update matrices of one shape at a time, then the parameters that AdamW updates."""
        shapes: dict[object, list[Tensor]] = {}
        for parameter in parameters:
            if _is_orthogonal(parameter, group):
                shapes.setdefault((parameter.shape, same_division(parameter)), []).append(parameter)
        for alike in shapes.values():
            for bucket in buckets(alike):
                self.apply(_rule_for(bucket), bucket, group)
        for bucket in buckets(p for p in parameters if not _is_orthogonal(p, group)):
            self.apply(AdamW.rule, bucket, group)

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """Zeros: a momentum, or AdamW's two averages."""
        names = ("momentum_buffer",) if _is_orthogonal(parameter, group) else ("exp_avg", "exp_avg_sq")
        return {name: zeros_wide(parameter) for name in names}


class _ShardedMuon(UpdateRule):
    """Local parts of sharded matrices, which have only one implementation."""

    def update(self, implementation: str, *lists: Any) -> None:
        """Always run the foreach form."""
        self.foreach(*lists)


def _rule_for(bucket: list[Tensor]) -> UpdateRule:
    # If a stack is divided along its first dimension, each rank has whole matrices.
    if not is_divided(bucket[0], -2, -1):
        return _MUON
    return _ShardedMuon(_update, functools.partial(_update_foreach, sharded=bucket))


def _is_orthogonal(parameter: Tensor, group: Group) -> bool:
    return group["orthogonal"] and parameter.ndim >= 2
