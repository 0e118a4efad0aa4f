"""RMSNorm and LayerNorm of each row, with the residual addition before it in the same pass, forward and backward.

With s = x + residual, mean m (0 for RMSNorm), r = 1 / sqrt(mean((s - m)²) + eps) and n = (s - m) · r, the result is
n · gain + bias. Its gradient with respect to s is r · (u - n · mean(u · n) - mean(u)), with u = gradient · gain and the
last term for LayerNorm only; the gradients of gain and bias are sums over rows: each program adds up the rows that it
has, and torch adds up the programs.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.triton_tiles import MOST_NORM_PROGRAMS, row_block, row_tile, tuned


def norm(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `napkin.kernels.norms.normalization.norm_reference`."""
    rows, width = x.shape
    of_sum = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    result, statistics = torch.empty_like(x, dtype=dtype or of_sum), x.new_empty(2, rows, dtype=torch.float32)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x, dtype=of_sum)
    if rows:
        norm_kernel[(rows,)](
            x, residual, gain, bias, result, summed, statistics, rows, width, eps,
            CENTRED=centred, ADDED=residual is not None, BIASED=bias is not None,
            BLOCK=row_block(width), num_warps=tuned("norm", row_tile(width), x, width).warps,
        )  # fmt: skip
    return result, summed, statistics


def norm_backward(
    gradient: Tensor,
    grad_summed: Tensor | None,
    summed: Tensor,
    gain: Tensor,
    statistics: Tensor,
    biased: bool,
    centred: bool,
    narrow: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `napkin.kernels.norms.normalization.norm_backward_reference`."""
    rows, width = summed.shape
    programs = min(rows, MOST_NORM_PROGRAMS)
    grad_sum = torch.empty_like(summed)
    grad_narrow = gain.new_empty(0) if narrow is None else torch.empty_like(summed, dtype=narrow)
    partial = summed.new_empty(2 if biased else 1, programs, width, dtype=torch.float32)
    if rows:
        norm_backward_kernel[(programs,)](
            gradient, grad_summed, summed, gain, statistics, grad_sum, grad_narrow, partial, rows, width,
            CENTRED=centred, ADDED=grad_summed is not None, BIASED=biased, NARROWED=narrow is not None,
            BLOCK=row_block(width), num_warps=tuned("norm backward", row_tile(width), summed, width).warps,
        )  # fmt: skip
    grad_bias = partial[1].sum(dim=0).to(gain.dtype) if biased else gain.new_empty(0)
    return grad_sum, grad_narrow, partial[0].sum(dim=0).to(gain.dtype), grad_bias


@triton.jit
@no_type_check
def norm_kernel(
    x, residual, gain, bias, result, summed, statistics, rows, width, eps,
    CENTRED: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes one row."""
    row, columns = tl.cast(tl.program_id(0), tl.int64), tl.arange(0, BLOCK)
    inside, at = columns < width, row * width + columns
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        s += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(summed.dtype.element_ty)
        tl.store(summed + at, rounded, mask=inside)
        s = rounded.to(tl.float32)
    mean = 0.0
    if CENTRED:
        mean = tl.sum(s, 0) / width
        s = tl.where(inside, s - mean, 0.0)
        tl.store(statistics + row, mean)
    inverse = 1.0 / tl.sqrt(tl.sum(s * s, 0) / width + eps)
    tl.store(statistics + rows + row, inverse)
    y = s * inverse * tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        y += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + at, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def norm_backward_kernel(
    gradient, grad_summed, summed, gain, statistics, grad_sum, grad_narrow, partial, rows, width,
    CENTRED: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr, NARROWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each of n programs computes every n-th row."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
    grad_gain = tl.zeros((BLOCK,), dtype=tl.float32)
    grad_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, rows, programs):
        at = tl.cast(row, tl.int64) * width + columns
        upstream = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(summed + at, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            s = tl.where(inside, s - tl.load(statistics + row), 0.0)
        inverse = tl.load(statistics + rows + row)
        normed = s * inverse
        grad_gain += upstream * normed
        if BIASED:
            grad_bias += upstream
        u = upstream * weight
        along = u - normed * (tl.sum(u * normed, 0) / width)
        if CENTRED:
            along -= tl.sum(u, 0) / width
        slope = along * inverse
        if ADDED:
            slope += tl.load(grad_summed + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_sum + at, slope.to(grad_sum.dtype.element_ty), mask=inside)
        if NARROWED:
            tl.store(grad_narrow + at, slope.to(grad_narrow.dtype.element_ty), mask=inside)
    tl.store(partial + program * width + columns, grad_gain, mask=inside)
    if BIASED:
        tl.store(partial + (programs + program) * width + columns, grad_bias, mask=inside)
