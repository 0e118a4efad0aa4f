"""x · weightᵀ + bias: torch's product, a compiled loop for a few vectors, and products in 8 bits, int8 or fp8.

int8: two of the three products are, the forward product and the gradient of the input. A row is divided by its scale,
its largest absolute value over 127, and rounded to integers. Their products are summed in int32, which is exact, and
multiplied by the scales of both rows: of a token, and of an output of the layer. The gradient of the input sums over
outputs, so the scales of these go into the gradient before it is rounded, and one copy of the weights in int8 serves
both products. The gradient of the weights sums over all tokens of a micro-batch, where errors of rounding would add up:
it is taken in bf16, of the rounded input, which is what the forward product has seen (SwitchBack: Wortsman et al. 2023,
"Stable and low-precision training for large-scale vision-language models").

fp8: e4m3 for inputs and weights, e5m2 for gradients, one scale per tensor. A tensor is divided by its scale, its
largest absolute value over the format's largest number, rounded, and multiplied; the product is multiplied by both
scales (Micikevicius et al. 2022). Scales are rounded up to powers of two, so that dividing by them rounds nothing.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.operator_forms import ShapeClass, fastest_form
from napkin.kernels.operators import (
    cpu_operator,
    is_bf16,
    may_be_compiled,
    on_threads,
    operator,
)

Rows = Float[Tensor, "*batch in_features"]
Weight = Float[Tensor, "out_features in_features"]
Bias = Float[Tensor, " out_features"]
Result = Float[Tensor, "*batch out_features"]
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x, weight and bias to x · weightᵀ + bias."""
Form = Literal["emulated", "native", "compiled"]
MULTIPLE = 16
"""The hardware multiplies only sizes that are multiples of this."""
_LARGEST = 127.0
_SMALLEST_ROW = 1e-30
"""The largest number of a row counts as no less, so that no scale is 0."""
_FEWEST_ROWS = 17
"""Rows that a product on a GPU must have at least."""
_ROWS_AT_ONCE = 512
"""Rows whose sums in int32 a CPU holds before they are scaled: few enough to stay in cache, and enough that packing the
other matrix for each does not count."""
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST_SCALE = 1e-30

MULTIPLE_OF_COLUMNS = 32
"""The compiled product needs a number of columns that is a multiple of this, see numba_dense.py."""
FEW_VECTORS = (1, 4, 8, 16, 64)
"""Numbers of vectors for which torch's product and the compiled one are timed; other numbers take the choice of the
next larger one."""
USUALLY_FEW = 16
"""The most vectors for which the compiled product is used if nothing was timed."""
FEW_PRODUCTS = "products of few vectors"
SMALLEST_MATRIX = 2**18
"""Numbers of a matrix from which the compiled product is worth being loaded."""


def linear(x: Rows, weight: Weight, bias: Bias | None = None) -> Result:
    """x · weightᵀ + bias: torch's or, for a few vectors in inference on a CPU in bf16, the compiled loop where it is
    faster and the matrix is large enough for it to be worth loading. Sums in fp32, result in bf16.

    The loop is an operator, which a meter sees: what is computed does not depend on whether it is metered.
    """
    # torch.compile cannot trace the question for inference mode, and is for training.
    if torch.compiler.is_compiling() or not may_be_compiled():
        return F.linear(x, weight, bias)
    if x.dtype != torch.bfloat16 or not has_compiled_product(weight) or not is_fastest(weight, x.shape[:-1].numel()):
        return F.linear(x, weight, bias)
    return multiply_vectors(x, weight, bias)


def is_fastest(weight: Tensor, n_vectors: int) -> bool:
    """True if the compiled product of so many vectors with a matrix that has one is faster than torch's."""
    if not 0 < n_vectors <= FEW_VECTORS[-1]:
        return False
    default = "compiled" if n_vectors <= USUALLY_FEW else "torch"
    return fastest_form(FEW_PRODUCTS, class_of_product(n_vectors, weight.shape), default) == "compiled"


def class_of_product(n_vectors: int, shape: torch.Size) -> ShapeClass:
    """The class of a product of few vectors, at most the last of FEW_VECTORS, with a matrix of that shape."""
    return (next(each for each in FEW_VECTORS if n_vectors <= each), *shape)


def has_compiled_product(weight: Tensor) -> bool:
    """True for a matrix that the compiled product of few vectors reads, and that is large enough for it."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.numel() >= SMALLEST_MATRIX
        and weight.shape[-1] % MULTIPLE_OF_COLUMNS == 0
        and weight.is_contiguous()
    )


@cpu_operator(
    "multiply_vector(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    lambda input, weight, bias: input.new_empty((*input.shape[:-1], len(weight))),
)
def multiply_vectors(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias by the compiled loop."""
    n_vectors, (n_rows, n_columns) = x.numel() // x.shape[-1], weight.shape
    result = torch.empty(*x.shape[:-1], n_rows)
    on_threads(
        "products.numba_dense.multiply_dense",
        (x.contiguous(), is_bf16(x), weight, result),
        (n_vectors, n_columns, n_rows),
        n_rows=n_rows,
        n_columns=n_columns * n_vectors,
    )
    return (result if bias is None else result.add_(bias)).to(x.dtype)


def int8_linear_emulated(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias on any hardware: the integers are multiplied in bf16, which holds them exactly.

    Sums are in fp32, exact for some 1,000 columns, and rounded to bf16 before they are scaled.
    """
    return _applied(_Int8Product, x, weight, bias, "emulated")


def int8_linear(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias by the int8 product of a GPU, and torch's operators around it; emulated for fewer than 17
    rows."""
    form = "native" if x.numel() >= _FEWEST_ROWS * x.shape[-1] else "emulated"
    return _applied(_Int8Product, x, weight, bias, form)


def compiled_int8_linear(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias by the int8 product of a CPU, and compiled loops around it; `int8_linear` on other devices."""
    if x.device.type != "cpu":
        return int8_linear(x, weight, bias)
    return _applied(_Int8Product, x, weight, bias, "compiled")


class _Int8Product(torch.autograd.Function):
    """rows · weightᵀ in bf16; keeps both in int8, a byte per number, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, form: Form) -> Tensor:
        # Dtypes are chosen here, operator by operator.
        with torch.autocast(rows.device.type, enabled=False):
            x, x_scales = _int8_rows(rows, None, form)
            w, w_scales = _int8_rows(weight, None, form)
            ctx.save_for_backward(x, x_scales, w, w_scales)
            ctx.form, ctx.dtypes = form, (rows.dtype, weight.dtype)
            return _scaled_product(x, w.T, x_scales, w_scales, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, x_scales, w, w_scales = ctx.saved_tensors
        gradient = grad_outputs[0].contiguous()
        g, g_scales = _int8_rows(gradient, w_scales, ctx.form)
        grad_rows = _scaled_product(g, w, g_scales, None, ctx.form)
        del g
        if not ctx.needs_input_grad[1]:
            return grad_rows.to(ctx.dtypes[0]), None, None
        grad_weight = gradient.T @ _restored(x, x_scales, ctx.form)
        return grad_rows.to(ctx.dtypes[0]), grad_weight.to(ctx.dtypes[1]), None


def _int8_rows(x: Tensor, factors: Tensor | None, form: Form) -> tuple[Tensor, Tensor]:
    return _compiled_quantize(x.contiguous(), factors) if form == "compiled" else quantize_rows(x, factors)


def _restored(numbers: Tensor, scales: Tensor, form: Form) -> Tensor:
    return _compiled_restore(numbers, scales) if form == "compiled" else restore_rows(numbers, scales)


def _scaled_product(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor | None, form: Form) -> Tensor:
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
    n_rows, n = x.shape
    numbers, scales = torch.empty_like(x, dtype=torch.int8), x.new_empty(n_rows, dtype=torch.float32)
    # Other formats are widened by torch.
    x = x if x.dtype == torch.bfloat16 else x.float()
    before = x, is_bf16(x), factors, numbers, scales
    on_threads("products.numba_products.quantize", before, (n,), n_rows=n_rows, n_columns=n, buffer_size=n)
    return numbers, scales


@cpu_operator(
    "int8_restore(Tensor numbers, Tensor scales) -> Tensor",
    lambda numbers, scales: torch.empty_like(numbers, dtype=torch.bfloat16),
)
def _compiled_restore(numbers: Tensor, scales: Tensor) -> Tensor:
    n_rows, n = numbers.shape
    result = torch.empty_like(numbers, dtype=torch.bfloat16)
    on_threads("products.numba_products.restore", (numbers, scales, result), (n,), n_rows=n_rows, n_columns=n)
    return result


@cpu_operator(
    "int8_product(Tensor left, Tensor right, Tensor rows, Tensor? columns) -> Tensor",
    lambda left, right, rows, columns: left.new_empty(len(left), right.shape[1], dtype=torch.bfloat16),
)
def _compiled_product(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor | None) -> Tensor:
    n_rows, n = len(left), right.shape[1]
    result = left.new_empty(n_rows, n, dtype=torch.bfloat16)
    room = left.new_empty(min(n_rows, _ROWS_AT_ONCE), n, dtype=torch.int32)
    for first, end in pairwise([*range(0, n_rows, _ROWS_AT_ONCE), n_rows]):
        sums = torch._int_mm(left[first:end], right, out=room[: end - first])  # pyright: ignore[reportPrivateImportUsage]
        before = sums, rows[first:], columns, result[first:]
        on_threads("products.numba_products.scale_sums", before, (n,), n_rows=end - first, n_columns=n)
    return result


def product_scratch_bytes(left: Tensor, right: Tensor) -> int:
    """Bytes of the sums in int32 that `int8_product` holds at a time."""
    return 4 * min(len(left), _ROWS_AT_ONCE) * right.shape[1]


def fp8_linear_emulated(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias on any hardware.

    Numbers rounded to fp8 are exact in bf16, so bf16 products differ from the hardware's only in the order of sums.
    """
    return _applied(_FP8Product, x, weight, bias, False)


def fp8_linear(x: Rows, weight: Weight, bias: Bias | None) -> Result:
    """x · weightᵀ + bias by the hardware's fp8 product; emulated if the number of rows is not a multiple of 16."""
    return _applied(_FP8Product, x, weight, bias, x.numel() % (MULTIPLE * x.shape[-1]) == 0)


class _FP8Product(torch.autograd.Function):
    """rows · weightᵀ; keeps both in fp8, a byte per number, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, native: bool) -> Tensor:
        # Dtypes are chosen here, operator by operator.
        with torch.autocast(rows.device.type, enabled=False):
            x, x_scale = _fp8_tensor(rows, False, native)
            w, w_scale = _fp8_tensor(weight, False, native)
            ctx.save_for_backward(x, x_scale, w, w_scale)
            ctx.native, ctx.dtypes = native, (rows.dtype, weight.dtype)
            return _fp8_product(x, x_scale, w.T, w_scale, native)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, x_scale, w, w_scale = ctx.saved_tensors
        g, g_scale = _fp8_tensor(grad_outputs[0], True, ctx.native)
        grad_rows = _fp8_product(g, g_scale, w, w_scale, ctx.native)
        if not ctx.needs_input_grad[1]:
            return grad_rows.to(ctx.dtypes[0]), None, None
        grad_weight = _fp8_product(g.T, g_scale, x, x_scale, ctx.native)
        return grad_rows.to(ctx.dtypes[0]), grad_weight.to(ctx.dtypes[1]), None


def _fp8_tensor(x: Tensor, gradient: bool, native: bool) -> tuple[Tensor, Tensor]:
    # torch.compile fuses the plain form by itself, and an emulated product is counted operator by operator.
    fused = native and not torch.compiler.is_compiling()
    return _fp8_quantize(x, gradient) if fused else fp8_quantize_reference(x, gradient)


def fp8_quantize_reference(x: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """x divided by its scale in the fp8 format of gradients or of what is multiplied forward, and the scale."""
    dtype = _BACKWARD if gradient else _FORWARD
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=_SMALLEST_SCALE).log2().ceil().exp2()
    return (x / scale).to(dtype), scale


def _fake_fp8_quantize(x: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    rounded = x.new_empty(x.shape, dtype=_BACKWARD if gradient else _FORWARD)
    return rounded, x.new_empty((), dtype=torch.float32)


_fp8_quantize = operator(
    "fp8_quantize(Tensor x, bool gradient) -> (Tensor, Tensor)",
    fake=_fake_fp8_quantize,
    triton="products.triton_fp8.fp8_quantize",
)(fp8_quantize_reference)


def _fp8_product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, native: bool) -> Tensor:
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


def _applied(product: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: Any) -> Tensor:
    """Apply one of the products above to the rows of x, and add the bias."""
    result: Any = product.apply(x.reshape(-1, x.shape[-1]), weight, form)
    result = result.view(*x.shape[:-1], -1)
    return result if bias is None else result + bias.to(result.dtype)


_FORMS: dict[str, dict[str, Multiply]] = {
    "fp8": {"cuda": fp8_linear, "emulated": fp8_linear_emulated},
    "int8": {"cuda": int8_linear, "cpu": compiled_int8_linear, "emulated": int8_linear_emulated},
}
_ALL = frozenset(form for forms in _FORMS.values() for form in forms.values())


def narrow_linear(format_name: Literal["fp8", "int8"], form: Literal["emulated", "cpu", "cuda"]) -> Multiply:
    """The form for hardware that multiplies the format, or the one for any other; a CPU's fp8 is emulated."""
    forms = _FORMS[format_name]
    return forms.get(form, forms["emulated"])


def is_narrow(multiply: Multiply) -> bool:
    """True if that is one of the forms above."""
    return multiply in _ALL


def takes_narrow(weight: Float[Tensor, "out_features in_features"]) -> bool:
    """True if hardware multiplies a weight of this shape in 8 bits."""
    return all(size % MULTIPLE == 0 for size in weight.shape)
