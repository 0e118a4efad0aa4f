"""RMS and layer normalization: plain, in compiled loops for a CPU (numba_norms.py), and fused for a GPU.

The fused form adds the residual to a row first, and reads and writes each number once: an operator of
`torch.ops.napkin`, a Triton kernel on a GPU (triton_norms.py), the plain form elsewhere. What the addition has in fp32
may be written in the narrower format of the product that reads it.

RMS: x / sqrt(mean(x²) + eps) · gain (Zhang & Sennrich 2019). Layer: (x - mean(x)) / sqrt(var(x) + eps) · gain + bias
(Ba et al. 2016). Both are computed in fp32 and returned in x's dtype.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.operators import as_rows, cpu_operator, is_bf16, is_computed, on_threads, operator

Vectors = Float[Tensor, "*batch d_model"]
Gain = Float[Tensor, " d_model"]

_ROWS_PER_SUM = 128
"""Rows whose gradients of gain and bias are added up one after another; the sums of so many are then added."""


def rms_norm_reference(x: Vectors, gain: Gain, eps: float) -> Vectors:
    """The formula; autograd keeps the input, its normalized form and the output."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * gain).to(x.dtype)


def rms_norm(x: Vectors, gain: Gain, eps: float) -> Vectors:
    """`rms_norm_reference` with a backward pass that keeps x and one number per vector."""
    return _RMSNorm.apply(x, gain, eps)  # pyright: ignore[reportReturnType]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        # In bf16 the mean of a thousand squares would have two correct digits.
        wide = x.float()
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gain, inverse_rms)
        return (wide * inverse_rms * gain).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gain, inverse_rms = ctx.saved_tensors
        gradient, normed = grad_outputs[0].float(), x.float() * inverse_rms
        by_gain = gradient * normed
        grad_gain = by_gain.flatten(0, -2).sum(dim=0).to(gain.dtype)
        along = by_gain.mul_(gain).mean(dim=-1, keepdim=True)
        # The output does not depend on the vector's length: the gradient's component along the vector is removed.
        grad_x = (gradient * gain).addcmul_(normed, along, value=-1).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_gain, None


def compiled_rms_norm(x: Vectors, gain: Gain, eps: float, *, narrow: bool = False) -> Vectors:
    """`rms_norm` in a compiled loop on a CPU; with `narrow`, under autocast, the result has autocast's format, which
    the product that reads it takes. Where the loop does not support the input, `rms_norm` computes.
    """
    result = _normalize_rows(x, gain, None, eps, centred=False, narrow=narrow)
    return rms_norm(x, gain, eps) if result is None else result


def layer_norm_reference(x: Vectors, gain: Gain, bias: Gain, eps: float) -> Vectors:
    """The formula, in x's dtype."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * gain + bias


def layer_norm(x: Vectors, gain: Gain, bias: Gain | None, eps: float) -> Vectors:
    """torch's operator in fp32, returned in x's dtype; the backward pass keeps x and two numbers per vector."""
    bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), gain.shape, gain.float(), bias, eps).to(x.dtype)


def compiled_layer_norm(x: Vectors, gain: Gain, bias: Gain | None, eps: float, *, narrow: bool = False) -> Vectors:
    """`layer_norm` in a compiled loop on a CPU; with `narrow`, under autocast, the result has autocast's format, which
    the product that reads it takes. Where the loop does not support the input, `layer_norm` computes. Models use
    `layer_norm`, which is faster between the products of a step.
    """
    result = _normalize_rows(x, gain, bias, eps, centred=True, narrow=narrow)
    return layer_norm(x, gain, bias, eps) if result is None else result


def _normalize_rows(
    x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, *, centred: bool, narrow: bool
) -> Tensor | None:
    """x normalized along its last dimension, in x's format; `narrow` under autocast in autocast's.

    None where there is no compiled loop for x.
    """
    # What does not fit is the plain form's to broadcast or to refuse: loops check nothing.
    if (
        not is_computed(x)
        or not x.numel()
        or any(each.shape != x.shape[-1:] for each in (gain, bias) if each is not None)
    ):
        return None
    dtype = torch.get_autocast_dtype("cpu") if narrow and torch.is_autocast_enabled("cpu") else x.dtype
    if dtype not in (torch.bfloat16, x.dtype):
        return None
    gain, bias = gain.float().contiguous(), None if bias is None else bias.float().contiguous()
    return _Norm.apply(x, gain, bias, eps, centred, dtype)  # pyright: ignore[reportReturnType]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
    ) -> Tensor:
        y, means, scales = _forward(x, gain, bias, eps, centred, dtype == torch.bfloat16)
        ctx.save_for_backward(x, gain, means, scales)
        ctx.options = centred, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_x, grad_gain, grad_bias = _backward(grad_outputs[0].contiguous(), *ctx.saved_tensors, *ctx.options)
        return grad_x, grad_gain, grad_bias if ctx.options[1] else None, None, None, None


def _empty_results(
    x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool, in_bf16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    means = torch.empty_like(scales) if centred else x.new_empty(0, dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.bfloat16 if in_bf16 else x.dtype), means, scales


@cpu_operator(
    "compiled_norm(Tensor x, Tensor gain, Tensor? bias, float eps, bool centred, bool in_bf16) "
    "-> (Tensor, Tensor, Tensor)",
    _empty_results,
)
def _forward(
    x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool, in_bf16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, means, scales = _empty_results(x, gain, bias, eps, centred, in_bf16)
    n = x.shape[-1]
    before = x, is_bf16(x), gain, bias, y, is_bf16(y), means, scales
    on_threads(
        "norms.numba_norms.norm_forward",
        before,
        (n, eps, centred),
        n_rows=x.numel() // n,
        n_columns=n,
        buffer_size=n,
    )
    return y, means, scales


def _empty_gradients(
    gradient: Tensor, x: Tensor, gain: Tensor, means: Tensor, scales: Tensor, centred: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gain), gain.new_empty(len(gain) if biased else 0)


@cpu_operator(
    "compiled_norm_backward(Tensor gradient, Tensor x, Tensor gain, Tensor means, Tensor scales, bool centred, "
    "bool biased) -> (Tensor, Tensor, Tensor)",
    _empty_gradients,
)
def _backward(
    gradient: Tensor, x: Tensor, gain: Tensor, means: Tensor, scales: Tensor, centred: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_gain, grad_bias = _empty_gradients(gradient, x, gain, means, scales, centred, biased)
    n = x.shape[-1]
    n_rows = x.numel() // n
    # The number of partial sums does not depend on the number of threads, and so neither does the result.
    n_sums = -(-n_rows // _ROWS_PER_SUM)
    gains, biases = np.empty((n_sums, n), np.float32), np.empty((n_sums, n if biased else 0), np.float32)
    inputs = gradient, is_bf16(gradient), x, is_bf16(x), gain, means, scales
    on_threads(
        "norms.numba_norms.norm_backward",
        (*inputs, grad_x, gains.ctypes.data, biases.ctypes.data if biased else 0),
        (n_rows, _ROWS_PER_SUM, n, centred),
        n_rows=n_sums,
        n_columns=n * _ROWS_PER_SUM,
        buffer_size=2 * n,
    )
    for sums, total in ((gains, grad_gain), (biases, grad_bias)):
        np.sum(sums, axis=0, out=total.numpy())
    return grad_x, grad_gain, grad_bias


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


def _fake_norm(
    x: Tensor, residual: Tensor | None, gain: Tensor, bias: Any, eps: float, centred: bool, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    of_sum = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x, dtype=of_sum)
    statistics = x.new_empty(2, len(x), dtype=torch.promote_types(of_sum, torch.float32))
    return torch.empty_like(x, dtype=dtype or of_sum), summed, statistics


def _fake_norm_backward(
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


_norm = operator(
    "fused_norm(Tensor x, Tensor? residual, Tensor gain, Tensor? bias, float eps, bool centred, ScalarType? dtype) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_norm,
    triton="norms.triton_norms.norm",
)(norm_reference)
_norm_backward = operator(
    "fused_norm_backward(Tensor gradient, Tensor? grad_summed, Tensor summed, Tensor gain, Tensor statistics, "
    "bool biased, bool centred, ScalarType? narrow) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_norm_backward,
    triton="norms.triton_norms.norm_backward",
)(norm_backward_reference)


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
    # At most one of the sum's two operands is narrower than the sum.
    narrow = next((dtype for dtype in ctx.dtypes if dtype not in (None, summed.dtype)), None)
    grad_sum, grad_narrow, grad_gain, grad_bias = _norm_backward(
        gradient, grad_summed, summed, gain, statistics, ctx.biased, ctx.centred, narrow
    )
    grads = (None if dtype is None else grad_sum if dtype == summed.dtype else grad_narrow for dtype in ctx.dtypes)
    return *grads, grad_gain, grad_bias if ctx.biased else None, None, None, None


_norm.register_autograd(_differentiate, setup_context=_save)
