"""Rotary positions, compiled: heads are rotated in one pass, forwards or backwards."""

from typing import Any

from napkin.kernels.compiled.number_conversions import FASTMATH
from napkin.kernels.compiled.rows import narrow_row, widen_row
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f32_at


@CompiledFunction.with_options(fastmath=FASTMATH)
def rotate_heads(
    x: Any,
    is_bf16: Any,
    x_stride: Any,
    y: Any,
    y_stride: Any,
    cosines: Any,
    signed_sines: Any,
    n_positions: Any,
    start: Any,
    stop: Any,
    n_heads: Any,
    width: Any,
    interleaved: Any,
    backwards: Any,
    buffer: Any,
) -> None:
    """y = x rotated, or rotated back, of the tokens start to stop.

    x and y are [tokens, n_heads, width]; from one token to the next it is x_stride and y_stride numbers. Token i stands
    at position i mod n_positions of the tables [n_positions, width], float32. The pairs are number j of each half, or
    neighbours where interleaved; the two sines of a pair are each other's negatives. The buffer holds 2 · width.
    """
    row, other = f32_at(buffer), f32_at(buffer + 4 * width)
    half = width // 2
    for i in range(start, stop):
        position = i % n_positions
        cosine, sine = f32_at(cosines + 4 * position * width), f32_at(signed_sines + 4 * position * width)
        for head in range(n_heads):
            widen_row(x, is_bf16, i * x_stride + head * width, width, row)
            if interleaved:
                for j in range(half):
                    other[2 * j], other[2 * j + 1] = row[2 * j + 1], row[2 * j]
            else:
                for j in range(half):
                    other[j], other[half + j] = row[half + j], row[j]
            if backwards:
                for j in range(width):
                    row[j] = row[j] * cosine[j] - other[j] * sine[j]
            else:
                for j in range(width):
                    row[j] = row[j] * cosine[j] + other[j] * sine[j]
            narrow_row(row, y, is_bf16, i * y_stride + head * width, width)
