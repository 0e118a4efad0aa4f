"""A product of ragged groups: rows sorted by group, each group times a matrix of its own.

How many rows a group has is data, so a loop over slices cannot be traced; as operators of their own, whose results have
shapes that do not depend on it, they can. Group e holds the rows from begins[e] to begins[e + 1], the last one to the
end.
"""

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def grouped_matmul(
    x: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "groups out_features in_features"],
    begins: Int[Tensor, " groups"],
) -> Float[Tensor, "rows out_features"]:
    """x · weight[e]ᵀ for the rows of each group e; in autocast's format where that is on."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x, weight = x.to(dtype), weight.to(dtype)
    return _matmul(x, weight, begins)


@torch.library.custom_op(
    "napkin::grouped_matmul", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor begins) -> Tensor"
)
def _matmul(x: Tensor, weight: Tensor, begins: Tensor) -> Tensor:
    result = x.new_empty(len(x), weight.shape[1])
    for group, rows in enumerate(_groups(begins, len(x))):
        torch.mm(x[rows], weight[group].T, out=result[rows])
    return result


@torch.library.custom_op(
    "napkin::grouped_outer", mutates_args=(), schema="(Tensor left, Tensor right, Tensor begins) -> Tensor"
)
def _outer(left: Tensor, right: Tensor, begins: Tensor) -> Tensor:
    """leftᵀ · right for the rows of each group: [groups, left's width, right's width]."""
    result = left.new_empty(len(begins), left.shape[1], right.shape[1])
    for group, rows in enumerate(_groups(begins, len(left))):
        torch.mm(left[rows].T, right[rows], out=result[group])
    return result


def _groups(begins: Tensor, n_rows: int) -> list[slice]:
    return [slice(begin, end) for begin, end in pairwise([*begins.tolist(), n_rows])]


@_matmul.register_fake
def _(x: Tensor, weight: Tensor, begins: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@_outer.register_fake
def _(left: Tensor, right: Tensor, begins: Tensor) -> Tensor:
    return left.new_empty(len(begins), left.shape[1], right.shape[1])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, begins = ctx.saved_tensors
    # A sum's gradient is one number seen as many: a matrix of it needs its own storage to be sliced and multiplied.
    gradient = gradient.contiguous()
    grad_x = _matmul(gradient, weight.transpose(1, 2), begins) if ctx.needs_input_grad[0] else None
    grad_weight = _outer(gradient, x, begins) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


_matmul.register_autograd(_backward, setup_context=_remember)
