"""Adafactor (Shazeer & Stern 2018, algorithms 4 and 5, without momentum).

With gradient g of a matrix, step t counted from 1, and β = 1 - t^-0.8::

    r ← β r + (1 - β) mean of g² over each row
    c ← β c + (1 - β) mean of g² over each column
    u ← g / sqrt(r c / mean(r))
    w ← (1 - lr · decay) w - min(lr, 1 / sqrt(t)) · max(eps, rms(w)) · u / max(1, rms(u) / clip)

For a vector the full average of g² takes the place of r c / mean(r).
"""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from typing import Unpack

import torch
from torch import Tensor

from napkin.optim.base import Form, Group, Optimizer, Parameters, UpdateRule, buckets, wide_dtype
from napkin.optim.saved_state import TorchTwin, local

# Means of squares below the resolution of fp32 are noise (torch.optim.Adafactor's eps1).
_TINY = torch.finfo(torch.float32).eps


def _update_matrix(parameter: Tensor, gradient: Tensor, rows: Tensor, columns: Tensor, group: Group) -> None:
    _average_squares(gradient, rows, columns, group)
    square = columns * (rows / rows.mean(dim=-2, keepdim=True).clamp_(min=_TINY))
    _move(parameter, gradient, square, group)


def _update_vector(parameter: Tensor, gradient: Tensor, square: Tensor, group: Group) -> None:
    square.lerp_(gradient.square(), _new_weight(group))
    _move(parameter, gradient, square.clone(), group)


def _move(parameter: Tensor, gradient: Tensor, square: Tensor, group: Group) -> None:
    length = _rms(parameter).clamp_(min=group["eps"]) * _relative_rate(group)
    update = square.clamp_(min=_TINY**2).rsqrt_().mul_(gradient)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.sub_(update.mul_(length / (_rms(update) / group["clip"]).clamp_(min=1)))


def _rms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor).div_(tensor.numel() ** 0.5)


def _update_matrices_foreach(
    parameters: list[Tensor], gradients: list[Tensor], rows: list[Tensor], columns: list[Tensor], group: Group
) -> None:
    for gradient, row, column in zip(gradients, rows, columns, strict=True):
        _average_squares(gradient, row, column, group)
    squares = [
        column * (row / row.mean(dim=-2, keepdim=True).clamp_(min=_TINY))
        for row, column in zip(rows, columns, strict=True)
    ]
    _move_foreach(parameters, gradients, squares, group)


def _update_vectors_foreach(
    parameters: list[Tensor], gradients: list[Tensor], squares: list[Tensor], group: Group
) -> None:
    torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), _new_weight(group))
    _move_foreach(parameters, gradients, [square.clone() for square in squares], group)


def _move_foreach(parameters: list[Tensor], gradients: list[Tensor], squares: list[Tensor], group: Group) -> None:
    lengths = _rms_foreach(parameters)
    torch._foreach_clamp_min_(lengths, group["eps"])
    torch._foreach_mul_(lengths, _relative_rate(group))
    torch._foreach_clamp_min_(squares, _TINY**2)
    torch._foreach_rsqrt_(squares)
    torch._foreach_mul_(squares, gradients)
    sizes = _rms_foreach(squares)
    torch._foreach_div_(sizes, group["clip"])
    torch._foreach_clamp_min_(sizes, 1)
    torch._foreach_div_(lengths, sizes)
    torch._foreach_mul_(squares, lengths)
    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_sub_(parameters, squares)


def _rms_foreach(tensors: list[Tensor]) -> list[Tensor]:
    norms = list(torch._foreach_norm(tensors, 2))
    torch._foreach_div_(norms, [tensor.numel() ** 0.5 for tensor in tensors])
    return norms


def _average_squares(gradient: Tensor, rows: Tensor, columns: Tensor, group: Group) -> None:
    # The square of a norm needs no matrix of squares.
    for averages, dim in ((rows, -1), (columns, -2)):
        means = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).square_().div_(gradient.shape[dim])
        averages.lerp_(means, _new_weight(group))


def _new_weight(group: Group) -> float:
    """The weight of the new squares in the averages: 1 - β = t^-0.8, which is 1 at the first step."""
    return group["step"] ** -0.8


def _relative_rate(group: Group) -> float:
    return min(group["lr"], group["step"] ** -0.5)


def _two_eps(theirs: Group) -> Group:
    """torch's eps is a pair, whose second number is ours."""
    if not isinstance(theirs.get("eps"), (list, tuple)):
        return theirs
    eps1, eps = theirs["eps"]
    return theirs | {"eps1": eps1, "eps": eps}


_MATRICES = UpdateRule(_update_matrix, _update_matrices_foreach)
_VECTORS = UpdateRule(_update_vector, _update_vectors_foreach)


class Adafactor(Optimizer):
    """Adam's second moment, of which a matrix keeps only the means of rows and columns; no first moment.

    Steps are relative to the size of the parameter (its root mean square, at least `eps`): a lr of 0.01 changes weights
    by about 1% per step. An update whose root mean square exceeds `clip` is scaled down to it.

    State: "row_var" and "col_var", 4 bytes per row and per column, which is near 0 bytes per parameter of a matrix;
    "variance", 4 bytes per parameter of a vector. Of a parameter with more than two dimensions the last two are the
    matrix. A step needs 4 bytes per number of the bucket. See `Optimizer` for the rest.

    Sharded parameters and gradients are gathered a bucket at a time, 8 bytes per number, and every rank updates all of
    them.
    """

    rule = _MATRICES
    twin = TorchTwin(
        "Adafactor",
        renamed={"d": "clip"},
        fixed={"beta2_decay": (-0.8,), "eps1": (None, _TINY)},
        optional={"maximize": (False,)},
        unpacked=_two_eps,
    )

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 1e-2,
        eps: float = 1e-3,
        clip: float = 1.0,
        weight_decay: float = 0.0,
        **form: Unpack[Form],
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "clip": clip, "weight_decay": weight_decay}, **form)

    def update_group(self, parameters: list[Tensor], group: Group) -> None:
        """Matrices by their rows and columns, then vectors."""
        for bucket in buckets(p for p in parameters if p.ndim >= 2):
            self.apply(_MATRICES, bucket, group, whole=True)
        for bucket in buckets(p for p in parameters if p.ndim < 2):
            self.apply(_VECTORS, bucket, group, whole=True)

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """Zeros: one per row and per column of a matrix. Not sharded: every rank has those of whole tensors."""
        here, dtype = local(parameter), wide_dtype(parameter)
        if parameter.ndim < 2:
            return {"variance": here.new_zeros(parameter.shape, dtype=dtype)}
        *stack, rows, columns = parameter.shape
        return {
            "row_var": here.new_zeros((*stack, rows, 1), dtype=dtype),
            "col_var": here.new_zeros((*stack, 1, columns), dtype=dtype),
        }
