"""Activation functions, rotary positions and their gradients, compiled: one pass over memory each, computed in float32.

Activations take numbers in pieces that stay in the processor's first cache.
"""

import numpy as np

from napkin.kernels.numba_numbers import FASTMATH, narrow_row, sigmoid, widen_row
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with
from napkin.machine_code.pointers import f32_at

_TWICE_SQRT_2_OVER_PI = np.float32(1.5957691216057308)
_CUBIC = np.float32(0.044715)


@jitted_with(fastmath=FASTMATH, inline="always")
def gelu_tanh(z):
    """z/2 · (1 + tanh(u)), u = sqrt(2/π) · (z + 0.044715 · z³): (1 + tanh(u)) / 2 is sigmoid(2u)."""
    return z * sigmoid(_TWICE_SQRT_2_OVER_PI * z * (np.float32(1) + _CUBIC * z * z))


@CompiledFunction.with_options(fastmath=FASTMATH)
def gelu_tanh_forward(x, is_bf16, y, start, stop, piece, buffer):
    """y = gelu_tanh(x) of the numbers start to stop. A piece stays in cache, in the buffer."""
    row = f32_at(buffer)
    for first in range(start, stop, piece):
        n = min(piece, stop - first)
        widen_row(x, is_bf16, first, n, row)
        for j in range(n):
            row[j] = gelu_tanh(row[j])
        narrow_row(row, y, is_bf16, first, n)


@CompiledFunction.with_options(fastmath=FASTMATH)
def gelu_tanh_backward(x, gradient, is_bf16, grad_x, start, stop, piece, buffer):
    """grad_x of the numbers start to stop; the buffer holds two pieces."""
    row, grad = f32_at(buffer), f32_at(buffer + 4 * piece)
    for first in range(start, stop, piece):
        n = min(piece, stop - first)
        widen_row(x, is_bf16, first, n, row)
        widen_row(gradient, is_bf16, first, n, grad)
        for j in range(n):
            z = row[j]
            s = sigmoid(_TWICE_SQRT_2_OVER_PI * z * (np.float32(1) + _CUBIC * z * z))
            inner = _TWICE_SQRT_2_OVER_PI * (np.float32(1) + np.float32(3) * _CUBIC * z * z)
            grad[j] *= s + z * s * (np.float32(1) - s) * inner
        narrow_row(grad, grad_x, is_bf16, first, n)


@CompiledFunction.with_options(fastmath=FASTMATH)
def swiglu_forward(gate_up, is_bf16, y, start, stop, width, buffer):
    """y = silu(gate) · up of the rows start to stop of gate_up [rows, 2 · width]; the buffer holds 2 · width."""
    gate, up = f32_at(buffer), f32_at(buffer + 4 * width)
    for i in range(start, stop):
        widen_row(gate_up, is_bf16, 2 * i * width, width, gate)
        widen_row(gate_up, is_bf16, (2 * i + 1) * width, width, up)
        for j in range(width):
            g = gate[j]
            up[j] *= g * sigmoid(g)
        narrow_row(up, y, is_bf16, i * width, width)


@CompiledFunction.with_options(fastmath=FASTMATH)
def swiglu_backward(gate_up, gradient, is_bf16, result, start, stop, width, buffer):
    """The gradient of gate and up, side by side, of the rows start to stop; the buffer holds 3 · width."""
    gate, up, grad = f32_at(buffer), f32_at(buffer + 4 * width), f32_at(buffer + 8 * width)
    for i in range(start, stop):
        widen_row(gate_up, is_bf16, 2 * i * width, width, gate)
        widen_row(gate_up, is_bf16, (2 * i + 1) * width, width, up)
        widen_row(gradient, is_bf16, i * width, width, grad)
        for j in range(width):
            g = gate[j]
            s = sigmoid(g)
            gate[j] = grad[j] * up[j] * s * (np.float32(1) + g * (np.float32(1) - s))
            up[j] = grad[j] * g * s
        narrow_row(gate, result, is_bf16, 2 * i * width, width)
        narrow_row(up, result, is_bf16, (2 * i + 1) * width, width)


@CompiledFunction.with_options(fastmath=FASTMATH)
def rotate_heads(
    x, is_bf16, x_stride, y, y_stride, cosines, signed_sines, n_positions, start, stop, n_heads, width, interleaved,
    backwards, buffer,
):  # fmt: skip
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
