"""The steps around the int8 product of a linear layer, compiled."""

import numpy as np

from napkin.kernels.numba_numbers import FASTMATH, bf16_at, larger, narrowed, nearest_integer, widen_row
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f32_at, i8_at, i32_at

_LARGEST = np.float32(127)
_SMALLEST_ROW = np.float32(1e-30)


@CompiledFunction
def quantize(x, is_bf16, factors, numbers, scales, start, stop, n, buffer):
    """numbers = x · factors / scale, to the nearest integer, of the rows start to stop; the scale of a row is its
    largest absolute value over 127. Factors are float32, or 0 for none. The buffer holds n."""
    row, numbers_of, scale_of = f32_at(buffer), i8_at(numbers), f32_at(scales)
    for i in range(start, stop):
        widen_row(x, is_bf16, i * n, n, row)
        if factors:
            factor_of = f32_at(factors)
            for j in range(n):
                row[j] *= factor_of[j]
        largest = _SMALLEST_ROW
        for j in range(n):
            largest = larger(largest, abs(row[j]))
        inverse = _LARGEST / largest
        for j in range(n):
            numbers_of[i * n + j] = np.int8(nearest_integer(row[j] * inverse))
        scale_of[i] = largest / _LARGEST


@CompiledFunction.with_options(fastmath=FASTMATH)
def restore(numbers, scales, y, start, stop, n, buffer):
    """y = numbers · scale of the rows start to stop, in bf16."""
    numbers_of, scale_of, y_of = i8_at(numbers), f32_at(scales), bf16_at(y)
    for i in range(start, stop):
        for j in range(n):
            y_of[i * n + j] = narrowed(np.float32(numbers_of[i * n + j]) * scale_of[i])


@CompiledFunction.with_options(fastmath=FASTMATH)
def scale_sums(sums, row_scales, column_scales, y, start, stop, n, buffer):
    """y = sums · row scale · column scale of the rows start to stop, in bf16; sums are int32, column scales float32, or
    0 for none."""
    sums_of, row_scale_of, y_of = i32_at(sums), f32_at(row_scales), bf16_at(y)
    for i in range(start, stop):
        scale = row_scale_of[i]
        if column_scales:
            column_scale_of = f32_at(column_scales)
            for j in range(n):
                y_of[i * n + j] = narrowed(np.float32(sums_of[i * n + j]) * scale * column_scale_of[j])
        else:
            for j in range(n):
                y_of[i * n + j] = narrowed(np.float32(sums_of[i * n + j]) * scale)
