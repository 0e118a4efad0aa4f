"""Grouped matrix product: rows sorted by group, each group times a matrix of its own, as a mixture of experts needs it.

How many rows a group has depends on the data, so a loop over slices cannot be traced. As operators whose results have
shapes that do not depend on it, the products can. Group e holds the rows from starts[e] to starts[e + 1], the last one
those to the end. On a GPU, Triton kernels (triton_grouped.py) take one launch per product, and do not wait for the
group sizes.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from napkin.kernels.operators import in_autocast_dtype, operator, save_inputs


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


def _fake_matmul(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@operator("grouped_matmul(Tensor x, Tensor weight, Tensor starts) -> Tensor", fake=_fake_matmul)
def _matmul(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    if _suits_torch(x, *weight.shape[1:]):
        return grouped_matmul_by_torch(x, weight, starts)
    result = _fake_matmul(x, weight, starts)
    for group, rows in enumerate(_groups(starts, len(x))):
        torch.mm(x[rows], weight[group].T, out=result[rows])
    return result


def _fake_outer(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    return left.new_empty(len(starts), left.shape[1], right.shape[1])


@operator("grouped_outer(Tensor left, Tensor right, Tensor starts) -> Tensor", fake=_fake_outer)
def _outer(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    """leftᵀ · right for the rows of each group: [groups, columns of left, columns of right]."""
    if _suits_torch(left, left.shape[1], right.shape[1]):
        return grouped_outer_by_torch(left, right, starts)
    result = _fake_outer(left, right, starts)
    for group, rows in enumerate(_groups(starts, len(left))):
        torch.mm(left[rows].T, right[rows], out=result[group])
    return result


def _suits_torch(x: Tensor, *widths: int) -> bool:
    """True if torch multiplies groups in one kernel: on Hopper and Blackwell in bf16, where rows begin at multiples of
    16 bytes. Elsewhere its own form reads on the host how many rows each has, as the loops here do."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.version.hip is not None or not len(x):
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10) and all(width % 8 == 0 for width in widths)


def grouped_matmul_by_torch(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """`grouped_matmul_reference` by torch's grouped product, which does not make the host wait for the group sizes."""
    return F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=_ends(starts, len(x)))


def grouped_outer_by_torch(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    """leftᵀ · right for the rows of each group, likewise."""
    ends = _ends(starts, len(left))
    products = F.grouped_mm(left.contiguous().T, right.contiguous(), offs=ends)
    # torch does not say what a group without rows gets.
    return products.masked_fill_((ends == starts)[:, None, None], 0)


def _ends(starts: Tensor, n_rows: int) -> Tensor:
    return torch.cat((starts[1:], starts.new_full((1,), n_rows))).to(torch.int32)


def _groups(starts: Tensor, n_rows: int) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise([*starts.tolist(), n_rows])]


def fused_grouped_matmul(
    x: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "groups out_features in_features"],
    starts: Int[Tensor, " groups"],
) -> Float[Tensor, "rows out_features"]:
    """x · weight[e]ᵀ for the rows of each group e; elsewhere than on a GPU as `grouped_matmul` computes it."""
    x, weight = in_autocast_dtype(x, weight)
    return _fused_matmul(x, weight, starts)


_fused_matmul = operator(
    "fused_grouped_matmul(Tensor x, Tensor weight, Tensor starts) -> Tensor",
    fake=_fake_matmul,
    triton="products.triton_grouped.grouped_matmul",
)(_matmul)
_fused_outer = operator(
    "fused_grouped_outer(Tensor left, Tensor right, Tensor starts) -> Tensor",
    fake=_fake_outer,
    triton="products.triton_grouped.grouped_outer",
)(lambda left, right, starts: _outer(left.contiguous(), right, starts))


def _differentiate(
    ctx: Any, gradient: Tensor, matmul: Callable[..., Tensor], outer: Callable[..., Tensor]
) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, starts = ctx.saved_tensors
    grad_x = matmul(gradient, weight.transpose(1, 2), starts) if ctx.needs_input_grad[0] else None
    grad_weight = outer(gradient, x, starts) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


# The gradient of a sum is one number expanded: it needs storage of its own to be sliced and multiplied.
_matmul.register_autograd(
    lambda ctx, gradient: _differentiate(ctx, gradient.contiguous(), _matmul, _outer), setup_context=save_inputs
)
_fused_matmul.register_autograd(
    lambda ctx, gradient: _differentiate(ctx, gradient, _fused_matmul, _fused_outer), setup_context=save_inputs
)
