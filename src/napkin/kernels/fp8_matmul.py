"""Linear layers with products in fp8: e4m3 for inputs and weights, e5m2 for gradients, one scale per tensor.

A tensor is divided by its scale, its largest absolute value over the format's largest number, rounded, and multiplied;
the product is multiplied by both scales (Micikevicius et al. 2022). Scales are rounded up to powers of two, so that
dividing by them rounds nothing.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST_SCALE = 1e-30

MULTIPLE = 16
"""The hardware multiplies only sizes that are multiples of this."""

Rows = Float[Tensor, "*batch in_features"]
Weight = Float[Tensor, "out_features in_features"]
Bias = Float[Tensor, " out_features"]
Result = Float[Tensor, "*batch out_features"]


def fp8_linear_emulated(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias on any hardware.

    Numbers rounded to fp8 are exact in bf16, so bf16 products differ from the hardware's only in the order of sums.
    """
    return _linear(x, weight, bias, native=False)


def fp8_linear(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias by the hardware's fp8 product; emulated if the number of rows is not a multiple of 16."""
    return _linear(x, weight, bias, native=True)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, native: bool) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    product: Any = _FP8Product.apply(rows, weight, native and len(rows) % MULTIPLE == 0)
    result = product.view(*x.shape[:-1], -1)
    return result if bias is None else result + bias.to(result.dtype)


class _FP8Product(torch.autograd.Function):
    """rows · weightᵀ; keeps both in fp8, a byte per number, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, native: bool) -> Tensor:
        # Dtypes are chosen here, operator by operator.
        with torch.autocast(rows.device.type, enabled=False):
            x, x_scale = _quantized(rows, _FORWARD)
            w, w_scale = _quantized(weight, _FORWARD)
            ctx.save_for_backward(x, x_scale, w, w_scale)
            ctx.native, ctx.dtypes = native, (rows.dtype, weight.dtype)
            return _product(x, x_scale, w.T, w_scale, native)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, x_scale, w, w_scale = ctx.saved_tensors
        g, g_scale = _quantized(grad_outputs[0], _BACKWARD)
        grad_rows = _product(g, g_scale, w, w_scale, ctx.native)
        if not ctx.needs_input_grad[1]:
            return grad_rows.to(ctx.dtypes[0]), None, None
        grad_weight = _product(g.T, g_scale, x, x_scale, ctx.native)
        return grad_rows.to(ctx.dtypes[0]), grad_weight.to(ctx.dtypes[1]), None


def _quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x divided by its scale in an fp8 format, and the scale."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=_SMALLEST_SCALE).log2().ceil().exp2()
    return (x / scale).to(dtype), scale


def _product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, native: bool) -> Tensor:
    """left · right in bf16, scaled back."""
    if native:
        # The hardware reads the left matrix by rows and the right one by columns.
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            left.contiguous(),
            right.T.contiguous().T,
            scale_a=left_scale,
            scale_b=right_scale,
            out_dtype=torch.bfloat16,
        )
    return (left.bfloat16() @ right.bfloat16()) * (left_scale * right_scale).bfloat16()
