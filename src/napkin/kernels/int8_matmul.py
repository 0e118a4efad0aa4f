"""Linear layers with two of their three products in int8: the forward product and the gradient of the input.

A row is divided by its scale, its largest absolute value over 127, and rounded to integers. Their products are summed
in int32, which is exact, and multiplied by the scales of both rows: of a token, and of an output of the layer. The
gradient of the input sums over outputs, so the scales of these go into the gradient before it is rounded, and one copy
of the weights in int8 serves both products.

The gradient of the weights sums over all tokens of a micro-batch, where errors of rounding would add up: it is taken in
bf16, of the rounded input, which is what the forward product has seen (SwitchBack: Wortsman et al. 2023, "Stable and
low-precision training for large-scale vision-language models").
"""

from itertools import pairwise
from typing import Any, Literal

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.compiled.loading import KERNELS
from napkin.kernels.cpu_operator import cpu_operator
from napkin.kernels.rows_on_threads import on_threads

Rows = Float[Tensor, "*batch in_features"]
Weight = Float[Tensor, "out_features in_features"]
Bias = Float[Tensor, " out_features"]
Result = Float[Tensor, "*batch out_features"]

Form = Literal["emulated", "native", "compiled"]

_LARGEST = 127.0
_SMALLEST_ROW = 1e-30
"""The largest number of a row counts as no less, so that no scale is 0."""
_FEWEST_ROWS = 17
"""A GPU's product takes no fewer."""
_ROWS_AT_ONCE = 512
"""Rows whose sums in int32 a CPU holds before they are scaled: few enough to stay in cache, and enough that packing the
other matrix for each does not count."""


def int8_linear_emulated(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias on any hardware: the integers are multiplied in bf16, which holds them exactly.

    Sums are in fp32, exact for some 1,000 columns, and rounded to bf16 before they are scaled.
    """
    return _linear(x, weight, bias, "emulated")


def int8_linear(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias by the int8 product of a GPU, and torch's operators around it; emulated for fewer than 17
    rows."""
    return _linear(x, weight, bias, "native" if x.numel() >= _FEWEST_ROWS * x.shape[-1] else "emulated")


def compiled_int8_linear(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias by the int8 product of a CPU, and compiled loops around it; `int8_linear` on other devices."""
    return _linear(x, weight, bias, "compiled") if x.device.type == "cpu" else int8_linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    product: Any = _Int8Product.apply(x.reshape(-1, x.shape[-1]), weight, form)
    result = product.view(*x.shape[:-1], -1)
    return result if bias is None else result + bias.to(result.dtype)


class _Int8Product(torch.autograd.Function):
    """rows · weightᵀ in bf16; keeps both in int8, a byte per number, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, form: Form) -> Tensor:
        # Dtypes are chosen here, operator by operator.
        with torch.autocast(rows.device.type, enabled=False):
            x, x_scales = _quantized(rows, None, form)
            w, w_scales = _quantized(weight, None, form)
            ctx.save_for_backward(x, x_scales, w, w_scales)
            ctx.form, ctx.dtypes = form, (rows.dtype, weight.dtype)
            return _product(x, w.T, x_scales, w_scales, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, x_scales, w, w_scales = ctx.saved_tensors
        gradient = grad_outputs[0].contiguous()
        g, g_scales = _quantized(gradient, w_scales, ctx.form)
        grad_rows = _product(g, w, g_scales, None, ctx.form)
        del g
        if not ctx.needs_input_grad[1]:
            return grad_rows.to(ctx.dtypes[0]), None, None
        grad_weight = gradient.T @ _restored(x, x_scales, ctx.form)
        return grad_rows.to(ctx.dtypes[0]), grad_weight.to(ctx.dtypes[1]), None


def _quantized(x: Tensor, factors: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    return _compiled_quantize(x.contiguous(), factors) if form == "compiled" else quantize_rows(x, factors)


def _restored(numbers: Tensor, scales: Tensor, form: Form) -> Tensor:
    return _compiled_restore(numbers, scales) if form == "compiled" else restore_rows(numbers, scales)


def _product(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor | None, form: Form) -> Tensor:
    """left · right in bf16, multiplied by the scales of the rows of the one and of the columns of the other."""
    if form == "compiled":
        return _compiled_product(left, right, rows, columns)
    # The hardware reads the left matrix by rows and the right one by columns.
    native = form == "native"
    sums = torch._int_mm(left, right.T.contiguous().T) if native else left.bfloat16() @ right.bfloat16()  # pyright: ignore[reportPrivateImportUsage]
    scaled = sums * rows[:, None]
    return (scaled if columns is None else scaled * columns).bfloat16()


def quantize_rows(
    x: Float[Tensor, "rows columns"], factors: Float[Tensor, " columns"] | None = None
) -> tuple[Int8[Tensor, "rows columns"], Float[Tensor, " rows"]]:
    """The rows of x, or of x · factors, as integers of 8 bits, and the scales in fp32 that multiply them back."""
    wide = x.float() if factors is None else x.float() * factors
    largest = wide.abs().amax(dim=1).clamp(min=_SMALLEST_ROW)
    # torch divides a plain number by a tensor in two steps, which round twice.
    inverse = torch.full_like(largest, _LARGEST) / largest
    return (wide * inverse[:, None]).round().to(torch.int8), largest / _LARGEST


def restore_rows(
    numbers: Int8[Tensor, "rows columns"], scales: Float[Tensor, " rows"]
) -> Float[Tensor, "rows columns"]:
    """The rows times their scales, in bf16."""
    return (numbers * scales[:, None]).bfloat16()


@cpu_operator(
    "int8_quantize(Tensor x, Tensor? factors) -> (Tensor, Tensor)",
    lambda x, factors: (torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)),
)
def _compiled_quantize(x: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    KERNELS.load("int8_rows")
    from napkin.kernels.compiled.int8_rows import quantize

    n_rows, n = x.shape
    numbers, scales = torch.empty_like(x, dtype=torch.int8), x.new_empty(n_rows, dtype=torch.float32)
    # Other formats are widened by torch.
    x = x if x.dtype == torch.bfloat16 else x.float()
    addresses = (
        *(x.data_ptr(), x.dtype == torch.bfloat16, 0 if factors is None else factors.data_ptr()),
        *(numbers.data_ptr(), scales.data_ptr()),
    )
    on_threads(quantize, lambda start, stop, buffer: (*addresses, start, stop, n, buffer), n_rows, n, n)
    return numbers, scales


@cpu_operator(
    "int8_restore(Tensor numbers, Tensor scales) -> Tensor",
    lambda numbers, scales: torch.empty_like(numbers, dtype=torch.bfloat16),
)
def _compiled_restore(numbers: Tensor, scales: Tensor) -> Tensor:
    KERNELS.load("int8_rows")
    from napkin.kernels.compiled.int8_rows import restore

    n_rows, n = numbers.shape
    result = torch.empty_like(numbers, dtype=torch.bfloat16)
    addresses = numbers.data_ptr(), scales.data_ptr(), result.data_ptr()
    on_threads(restore, lambda start, stop, buffer: (*addresses, start, stop, n), n_rows, n, 0)
    return result


@cpu_operator(
    "int8_product(Tensor left, Tensor right, Tensor rows, Tensor? columns) -> Tensor",
    lambda left, right, rows, columns: left.new_empty(len(left), right.shape[1], dtype=torch.bfloat16),
)
def _compiled_product(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor | None) -> Tensor:
    KERNELS.load("int8_rows")
    from napkin.kernels.compiled.int8_rows import scale_sums

    n_rows, n = len(left), right.shape[1]
    result = left.new_empty(n_rows, n, dtype=torch.bfloat16)
    held = left.new_empty(min(n_rows, _ROWS_AT_ONCE), n, dtype=torch.int32)
    column_scales = 0 if columns is None else columns.data_ptr()
    for first, end in pairwise([*range(0, n_rows, _ROWS_AT_ONCE), n_rows]):
        sums = torch._int_mm(left[first:end], right, out=held[: end - first])  # pyright: ignore[reportPrivateImportUsage]
        addresses = sums.data_ptr(), rows[first:].data_ptr(), column_scales, result[first:].data_ptr()
        on_threads(scale_sums, lambda start, stop, buffer, at=addresses: (*at, start, stop, n), end - first, n, 0)
    return result


def product_scratch_bytes(left: Tensor, right: Tensor) -> int:
    """Bytes of the sums in int32 that `int8_product` holds at a time."""
    return 4 * min(len(left), _ROWS_AT_ONCE) * right.shape[1]
