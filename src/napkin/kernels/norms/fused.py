"""RMSNorm and LayerNorm of each row with the residual addition before it: each number is read and written once.

One operator of `torch.ops.napkin`, forward and backward: a Triton kernel on a GPU (triton_norms.py), the plain form
elsewhere. What the addition has in fp32 may be written in the narrower format of the product that reads it.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.operators import as_rows
from napkin.kernels.triton_usable import runs_triton

Vectors = Float[Tensor, "*batch d_model"]
Gain = Float[Tensor, " d_model"]


def fused_rms_norm(
    x: Vectors, gain: Gain, eps: float, residual: Vectors | None = None, *, dtype: torch.dtype | None = None
) -> tuple[Vectors, Vectors]:
    """rms_norm(x + residual), and the sum, which is x if there is no residual.

    The sum has the wider of both dtypes; the norm has `dtype`, None is that of the sum.
    """
    return _normed(x, residual, gain, None, eps, dtype, centred=False)


def fused_layer_norm(
    x: Vectors,
    gain: Gain,
    bias: Gain | None,
    eps: float,
    residual: Vectors | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Vectors, Vectors]:
    """layer_norm(x + residual), and the sum, as in `fused_rms_norm`."""
    return _normed(x, residual, gain, bias, eps, dtype, centred=True)


def _normed(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
    *,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    rows = None if residual is None else as_rows(residual)
    result, summed, _ = torch.ops.napkin.fused_norm(as_rows(x), rows, gain, bias, eps, centred, dtype)
    return result.view(x.shape), x if residual is None else summed.view(x.shape)


def norm_reference(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x [rows, width], the sum, and the rows' means and inverse deviations, [2, rows] in fp32.

    The sum is empty without a residual, else it is rounded to its dtype before it is normalized. Means are not written
    where they are not subtracted.
    """
    summed = x if residual is None else x + residual
    wide = summed.to(torch.promote_types(summed.dtype, torch.float32))
    statistics = wide.new_zeros(2, len(x))
    if centred:
        statistics[0] = wide.mean(dim=1)
        wide = wide - statistics[0, :, None]
    statistics[1] = torch.rsqrt(wide.square().mean(dim=1) + eps)
    result = wide * statistics[1, :, None] * gain
    result = result if bias is None else result + bias
    return result.to(dtype or summed.dtype), x.new_empty(0) if residual is None else summed, statistics


def norm_backward_reference(
    gradient: Tensor,
    grad_summed: Tensor | None,
    summed: Tensor,
    gain: Tensor,
    statistics: Tensor,
    biased: bool,
    centred: bool,
    narrow: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the sum, the same in `narrow`, of the gain and of the bias; empty what there is none of."""
    wide, upstream = summed.to(statistics.dtype), gradient.to(statistics.dtype)
    normed = (wide - statistics[0, :, None] if centred else wide) * statistics[1, :, None]
    by_gain = upstream * gain
    along = by_gain - normed * (by_gain * normed).mean(dim=1, keepdim=True)
    along = along - by_gain.mean(dim=1, keepdim=True) if centred else along
    slope = along * statistics[1, :, None]
    slope = slope if grad_summed is None else slope + grad_summed
    grad_bias = upstream.sum(dim=0).to(gain.dtype) if biased else gain.new_empty(0)
    grad_narrow = gain.new_empty(0) if narrow is None else slope.to(narrow)
    return slope.to(summed.dtype), grad_narrow, (upstream * normed).sum(dim=0).to(gain.dtype), grad_bias


_NORM = (
    "(Tensor x, Tensor? residual, Tensor gain, Tensor? bias, float eps, bool centred, ScalarType? dtype) "
    "-> (Tensor, Tensor, Tensor)"
)
_NORM_BACKWARD = (
    "(Tensor gradient, Tensor? grad_summed, Tensor summed, Tensor gain, Tensor statistics, bool biased, bool centred, "
    "ScalarType? narrow) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("napkin::fused_norm", mutates_args=(), schema=_NORM)
def _norm(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_triton(x):
        return norm_reference(x, *others)
    from napkin.kernels.norms.triton_norms import norm

    return norm(x, *others)


@torch.library.custom_op("napkin::fused_norm_backward", mutates_args=(), schema=_NORM_BACKWARD)
def _norm_backward(gradient: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not runs_triton(gradient):
        return norm_backward_reference(gradient, *others)
    from napkin.kernels.norms.triton_norms import norm_backward

    return norm_backward(gradient, *others)


@_norm.register_fake
def _(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_sum = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x, dtype=of_sum)
    statistics = x.new_empty(2, len(x), dtype=torch.promote_types(of_sum, torch.float32))
    return torch.empty_like(x, dtype=dtype or of_sum), summed, statistics


@_norm_backward.register_fake
def _(
    gradient: Tensor,
    grad_summed: Tensor | None,
    summed: Tensor,
    gain: Tensor,
    statistics: Tensor,
    biased: bool,
    centred: bool,
    narrow: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_narrow = gain.new_empty(0) if narrow is None else torch.empty_like(summed, dtype=narrow)
    grad_bias = torch.empty_like(gain) if biased else gain.new_empty(0)
    return torch.empty_like(summed), grad_narrow, torch.empty_like(gain), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, gain, bias, _, ctx.centred, _ = inputs
    summed = x if residual is None else output[1]
    ctx.biased, ctx.dtypes = bias is not None, (x.dtype, None if residual is None else residual.dtype)
    ctx.save_for_backward(summed, gain, output[2])
    ctx.mark_non_differentiable(*(output[1:] if residual is None else [output[2]]))
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, grad_summed: Tensor | None, _: Any) -> tuple[Any, ...]:
    summed, gain, statistics = ctx.saved_tensors
    gradient = torch.zeros_like(summed) if gradient is None else gradient.contiguous()
    grad_summed = None if grad_summed is None else grad_summed.contiguous()
    # Of the sum's two parts at most one is narrower than the sum.
    narrow = next((dtype for dtype in ctx.dtypes if dtype not in (None, summed.dtype)), None)
    grad_sum, grad_narrow, grad_gain, grad_bias = _norm_backward(
        gradient, grad_summed, summed, gain, statistics, ctx.biased, ctx.centred, narrow
    )
    grads = (None if dtype is None else grad_sum if dtype == summed.dtype else grad_narrow for dtype in ctx.dtypes)
    return *grads, grad_gain, grad_bias if ctx.biased else None, None, None, None


_norm.register_autograd(_differentiate, setup_context=_save)
