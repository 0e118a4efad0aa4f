"""The grouped matrix product of `grouped_gemm` as one launch per product on a GPU, and no wait for the group sizes."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import napkin.kernels.grouped_gemm  # noqa: F401  # makes operators of torch.ops.napkin
from napkin.kernels.autocast import in_autocast_dtype
from napkin.kernels.triton.usable import runs_triton

_SAME_DTYPE = "(Tensor x, Tensor weight, Tensor starts) -> Tensor"


def fused_grouped_matmul(
    x: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "groups out_features in_features"],
    starts: Int[Tensor, " groups"],
) -> Float[Tensor, "rows out_features"]:
    """x · weight[e]ᵀ for the rows of each group e; elsewhere than on a GPU as `grouped_matmul` computes it."""
    x, weight = in_autocast_dtype(x, weight)
    return _matmul(x, weight, starts)


@torch.library.custom_op("napkin::fused_grouped_matmul", mutates_args=(), schema=_SAME_DTYPE)
def _matmul(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    if not runs_triton(x):
        return torch.ops.napkin.grouped_matmul(x, weight, starts)
    from napkin.kernels.triton.grouped_products import grouped_matmul

    return grouped_matmul(x, weight, starts)


@torch.library.custom_op(
    "napkin::fused_grouped_outer", mutates_args=(), schema="(Tensor left, Tensor right, Tensor starts) -> Tensor"
)
def _outer(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    if not runs_triton(left):
        return torch.ops.napkin.grouped_outer(left.contiguous(), right, starts)
    from napkin.kernels.triton.grouped_products import grouped_outer

    return grouped_outer(left, right, starts)


@_matmul.register_fake
def _(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@_outer.register_fake
def _(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    return left.new_empty(len(starts), left.shape[1], right.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, starts = ctx.saved_tensors
    grad_x = _matmul(gradient, weight.transpose(1, 2), starts) if ctx.needs_input_grad[0] else None
    grad_weight = _outer(gradient, x, starts) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


_matmul.register_autograd(_backward, setup_context=_save)
