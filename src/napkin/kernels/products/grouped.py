"""Grouped matrix product: rows sorted by group, each group times a matrix of its own, as a mixture of experts needs it.

How many rows a group has depends on the data, so a loop over slices cannot be traced. As operators whose results have
shapes that do not depend on it, the products can. Group e holds the rows from starts[e] to starts[e + 1], the last one
those to the end. On a GPU, Triton kernels (triton_grouped.py) take one launch per product, and do not wait for the
group sizes.
"""

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from napkin.kernels.operators import in_autocast_dtype
from napkin.kernels.triton_usable import runs_triton


def grouped_matmul_reference(
    x: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "groups out_features in_features"],
    starts: Int[Tensor, " groups"],
) -> Float[Tensor, "rows out_features"]:
    """x · weight[e]ᵀ for the rows of each group e, one group after another."""
    return torch.cat([x[rows] @ matrix.T for rows, matrix in zip(_groups(starts, len(x)), weight, strict=True)])


def grouped_matmul(
    x: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "groups out_features in_features"],
    starts: Int[Tensor, " groups"],
) -> Float[Tensor, "rows out_features"]:
    """`grouped_matmul_reference` as an operator; under autocast in autocast's dtype."""
    x, weight = in_autocast_dtype(x, weight)
    return _matmul(x, weight, starts)


@torch.library.custom_op(
    "napkin::grouped_matmul", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor starts) -> Tensor"
)
def _matmul(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    result = x.new_empty(len(x), weight.shape[1])
    for group, rows in enumerate(_groups(starts, len(x))):
        torch.mm(x[rows], weight[group].T, out=result[rows])
    return result


@torch.library.custom_op(
    "napkin::grouped_outer", mutates_args=(), schema="(Tensor left, Tensor right, Tensor starts) -> Tensor"
)
def _outer(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    """leftᵀ · right for the rows of each group: [groups, columns of left, columns of right]."""
    result = left.new_empty(len(starts), left.shape[1], right.shape[1])
    for group, rows in enumerate(_groups(starts, len(left))):
        torch.mm(left[rows].T, right[rows], out=result[group])
    return result


def _groups(starts: Tensor, n_rows: int) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise([*starts.tolist(), n_rows])]


@_matmul.register_fake
def _fake_matmul(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@_outer.register_fake
def _fake_outer(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    return left.new_empty(len(starts), left.shape[1], right.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, starts = ctx.saved_tensors
    # The gradient of a sum is one number expanded: it needs storage of its own to be sliced and multiplied.
    gradient = gradient.contiguous()
    grad_x = _matmul(gradient, weight.transpose(1, 2), starts) if ctx.needs_input_grad[0] else None
    grad_weight = _outer(gradient, x, starts) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


_matmul.register_autograd(_differentiate, setup_context=_save)


def fused_grouped_matmul(
    x: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "groups out_features in_features"],
    starts: Int[Tensor, " groups"],
) -> Float[Tensor, "rows out_features"]:
    """x · weight[e]ᵀ for the rows of each group e; elsewhere than on a GPU as `grouped_matmul` computes it."""
    x, weight = in_autocast_dtype(x, weight)
    return _fused_matmul(x, weight, starts)


@torch.library.custom_op(
    "napkin::fused_grouped_matmul", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor starts) -> Tensor"
)
def _fused_matmul(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    if not runs_triton(x):
        return _matmul(x, weight, starts)
    from napkin.kernels.products.triton_grouped import grouped_matmul

    return grouped_matmul(x, weight, starts)


@torch.library.custom_op(
    "napkin::fused_grouped_outer", mutates_args=(), schema="(Tensor left, Tensor right, Tensor starts) -> Tensor"
)
def _fused_outer(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    if not runs_triton(left):
        return _outer(left.contiguous(), right, starts)
    from napkin.kernels.products.triton_grouped import grouped_outer

    return grouped_outer(left, right, starts)


def _differentiate_fused(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, starts = ctx.saved_tensors
    grad_x = _fused_matmul(gradient, weight.transpose(1, 2), starts) if ctx.needs_input_grad[0] else None
    grad_weight = _fused_outer(gradient, x, starts) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


# The shapes of the results are those above.
_fused_matmul.register_fake(_fake_matmul)
_fused_outer.register_fake(_fake_outer)
_fused_matmul.register_autograd(_differentiate_fused, setup_context=_save)
