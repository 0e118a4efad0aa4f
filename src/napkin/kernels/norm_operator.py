"""Layer and RMS normalization in compiled loops for a CPU: what layer_normalization.py and rms_normalization.py have in
common."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.compiled.loading import float_bits, load_for_training
from napkin.kernels.cpu_operator import cpu_operator, is_computed
from napkin.kernels.rows_on_threads import on_threads


def normalize_rows(
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
    from napkin.kernels.compiled.norm_rows import norm_forward

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

    from napkin.kernels.compiled.norm_rows import ROWS_PER_SUM, norm_backward

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
