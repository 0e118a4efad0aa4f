"""The Triton kernels of products with integers, which become numbers in registers: a weight is read once, in 8 or 4
bits, and never written.

Scales multiply sums, not weights: of a row in int8; of a group of it in int4, whose middles multiply the sum of its
columns of x. Even and odd columns, which share a byte, are two products.
"""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.triton_tiles import dot_precision

_ROWS, _COLUMNS = 32, 128


def quantized_product(x: Tensor, values: Tensor, scales: Tensor, middles: Tensor | None) -> Tensor:
    """See `napkin.kernels.products.quantized.quantized_product_reference`."""
    n_vectors, n_columns = x.shape
    n_rows = len(values)
    result = x.new_empty(n_vectors, n_rows)
    if not result.numel():
        return result
    vectors = min(64, max(16, triton.next_power_of_2(n_vectors)))
    grid = (triton.cdiv(n_rows, _ROWS), triton.cdiv(n_vectors, vectors))
    shared = {"VECTORS": vectors, "ROWS": _ROWS, "PRECISION": dot_precision(x.dtype), "num_warps": 4, "num_stages": 3}
    if middles is None:
        int8_kernel[grid](
            x, values, scales, result, n_vectors, n_rows, n_columns, x.stride(0), COLUMNS=_COLUMNS, **shared
        )
    else:
        n_groups = scales.shape[1]
        half = values.shape[1] // n_groups
        int4_kernel[grid](
            x, values, scales, middles, result, n_vectors, n_rows, n_columns, n_groups, x.stride(0), HALF=half, **shared
        )
    return result


@triton.jit
@no_type_check
def int8_kernel(
    x, values, scales, result, n_vectors, n_rows, n_columns, x_row,
    VECTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of the matrix times some vectors: grid [blocks of rows, blocks of vectors]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    vectors = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    in_matrix, in_x = rows < n_rows, vectors < n_vectors
    matrix_row = tl.cast(rows, tl.int64) * n_columns
    sums = tl.zeros((VECTORS, ROWS), dtype=tl.float32)
    for start in range(0, n_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < n_columns
        part = tl.load(x + vectors[:, None] * x_row + columns[None, :], mask=in_x[:, None] & inside[None, :], other=0.0)
        weights = tl.load(
            values + matrix_row[:, None] + columns[None, :], mask=in_matrix[:, None] & inside[None, :], other=0
        )
        sums = tl.dot(part, tl.trans(weights.to(part.dtype)), sums, input_precision=PRECISION)
    sums *= tl.load(scales + rows, mask=in_matrix, other=0.0).to(tl.float32)[None, :]
    at = result + vectors[:, None] * n_rows + rows[None, :]
    tl.store(at, sums.to(result.dtype.element_ty), mask=in_x[:, None] & in_matrix[None, :])


@triton.jit
@no_type_check
def int4_kernel(
    x, values, scales, middles, result, n_vectors, n_rows, n_columns, n_groups, x_row,
    VECTORS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same, a group of columns at a time, which has HALF bytes in a row."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    vectors = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    in_matrix, in_x = rows < n_rows, vectors < n_vectors
    matrix_row = tl.cast(rows, tl.int64) * n_groups
    sums = tl.zeros((VECTORS, ROWS), dtype=tl.float32)
    for group in range(0, n_groups):
        bytes_ = group * HALF + tl.arange(0, HALF)
        x_at = x + vectors[:, None] * x_row + 2 * bytes_[None, :]
        even = tl.load(x_at, mask=in_x[:, None] & (2 * bytes_ < n_columns)[None, :], other=0.0)
        odd = tl.load(x_at + 1, mask=in_x[:, None] & (2 * bytes_ + 1 < n_columns)[None, :], other=0.0)
        both = tl.load(values + (matrix_row * HALF)[:, None] + bytes_[None, :], mask=in_matrix[:, None], other=0).to(
            tl.int32
        )
        low = ((both & 15) - 8).to(even.dtype)
        high = ((both >> 4) - 8).to(even.dtype)
        products = tl.dot(even, tl.trans(low), input_precision=PRECISION)
        products = tl.dot(odd, tl.trans(high), products, input_precision=PRECISION)
        scale = tl.load(scales + matrix_row + group, mask=in_matrix, other=0.0).to(tl.float32)
        middle = tl.load(middles + matrix_row + group, mask=in_matrix, other=0.0).to(tl.float32)
        of_group = tl.sum(even.to(tl.float32), 1) + tl.sum(odd.to(tl.float32), 1)
        sums += products * scale[None, :] + of_group[:, None] * middle[None, :]
    at = result + vectors[:, None] * n_rows + rows[None, :]
    tl.store(at, sums.to(result.dtype.element_ty), mask=in_x[:, None] & in_matrix[None, :])
