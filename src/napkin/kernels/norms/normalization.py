"""RMS and layer normalization, plain and in compiled loops for a CPU (numba_norms.py); fused.py has them for a GPU.

RMS: x / sqrt(mean(x²) + eps) · gain (Zhang & Sennrich 2019). Layer: (x - mean(x)) / sqrt(var(x) + eps) · gain + bias
(Ba et al. 2016). Both are computed in fp32 and returned in x's dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.operators import cpu_operator, float_bits, is_computed, load_for_training
from napkin.kernels.threads import on_threads

Vectors = Float[Tensor, "*batch d_model"]


Gain = Float[Tensor, " d_model"]


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
        # In bf16 the mean of a thousand squares would keep two digits.
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
    """`rms_norm` in a compiled loop on a CPU, `narrow` under autocast in autocast's format, as what reads it takes it.

    `rms_norm` where there is no such loop.
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
    """`layer_norm` in a compiled loop on a CPU, `narrow` under autocast in autocast's format, as what reads it takes
    it.

    `layer_norm` where there is no such loop. Models take `layer_norm`, which is faster between the products of a step.
    """
    result = _normalize_rows(x, gain, bias, eps, centred=True, narrow=narrow)
    return layer_norm(x, gain, bias, eps) if result is None else result


def _normalize_rows(
    x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, *, centred: bool, narrow: bool
) -> Tensor | None:
    """x normalized along its last dimension, in x's format; `narrow` under autocast in autocast's.

    None where there is no compiled loop for x.
    """
    if not is_computed(x) or not x.numel():
        return None
    dtype = torch.get_autocast_dtype("cpu") if narrow and torch.is_autocast_enabled("cpu") else x.dtype
    if dtype not in (torch.bfloat16, x.dtype):
        return None
    bias = None if bias is None else bias.float()
    return _Norm.apply(x, gain.float(), bias, eps, centred, dtype)  # pyright: ignore[reportReturnType]


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


def _fake_forward(
    x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool, in_bf16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
    means = torch.empty_like(scales) if centred else x.new_empty(0, dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.bfloat16 if in_bf16 else x.dtype), means, scales


@cpu_operator(
    "compiled_norm(Tensor x, Tensor gain, Tensor? bias, float eps, bool centred, bool in_bf16) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_forward,
)
def _forward(
    x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool, in_bf16: bool
) -> tuple[Tensor, Tensor, Tensor]:
    load_for_training()
    from napkin.kernels.norms.numba_norms import norm_forward

    y, means, scales = _fake_forward(x, gain, bias, eps, centred, in_bf16)
    n = x.shape[-1]
    tensors = x.data_ptr(), x.dtype == torch.bfloat16, gain.data_ptr(), 0 if bias is None else bias.data_ptr()
    results = y.data_ptr(), y.dtype == torch.bfloat16, means.data_ptr(), scales.data_ptr()
    on_threads(
        norm_forward,
        lambda start, stop, buffer: (*tensors, *results, start, stop, n, float_bits(eps), centred, buffer),
        x.numel() // n,
        n,
        n,
    )
    return y, means, scales


def _fake_backward(
    gradient: Tensor, x: Tensor, gain: Tensor, means: Tensor, scales: Tensor, centred: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gain), gain.new_empty(len(gain) if biased else 0)


@cpu_operator(
    "compiled_norm_backward(Tensor gradient, Tensor x, Tensor gain, Tensor means, Tensor scales, bool centred, "
    "bool biased) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def _backward(
    gradient: Tensor, x: Tensor, gain: Tensor, means: Tensor, scales: Tensor, centred: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    load_for_training()
    import numpy as np

    from napkin.kernels.norms.numba_norms import ROWS_PER_SUM, norm_backward

    grad_x, grad_gain, grad_bias = _fake_backward(gradient, x, gain, means, scales, centred, biased)
    n = x.shape[-1]
    n_rows = x.numel() // n
    # As many sums whatever the number of threads: the result does not depend on it.
    n_sums = -(-n_rows // ROWS_PER_SUM)
    gains, biases = np.empty((n_sums, n), np.float32), np.empty((n_sums if biased else 0, n), np.float32)
    inputs = gradient.data_ptr(), gradient.dtype == torch.bfloat16, x.data_ptr(), x.dtype == torch.bfloat16
    kept = gain.data_ptr(), means.data_ptr(), scales.data_ptr()
    results = grad_x.data_ptr(), gains.ctypes.data, biases.ctypes.data if biased else 0
    on_threads(
        norm_backward,
        lambda start, stop, buffer: (*inputs, *kept, *results, start, stop, n_rows, n, centred, buffer),
        n_sums,
        n * ROWS_PER_SUM,
        2 * n,
    )
    np.sum(gains, axis=0, out=grad_gain.numpy())
    if biased:
        np.sum(biases, axis=0, out=grad_bias.numpy())
    return grad_x, grad_gain, grad_bias
