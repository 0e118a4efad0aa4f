"""Activation functions and their gradients, compiled: one pass over memory each, computed in float32.

Numbers are taken in pieces that stay in the processor's first cache.
"""

from typing import Any

import numpy as np

from napkin.kernels.compiled.number_conversions import FASTMATH, sigmoid
from napkin.kernels.compiled.rows import narrow_row, widen_row
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f32_at

PIECE = 1024
"""Numbers at a time."""
_TWICE_SQRT_2_OVER_PI = np.float32(1.5957691216057308)
_CUBIC = np.float32(0.044715)


@CompiledFunction.with_options(fastmath=FASTMATH)
def gelu_tanh_forward(x: Any, is_bf16: Any, y: Any, start: Any, stop: Any, buffer: Any) -> None:
    """y = x/2 · (1 + tanh(u)), u = sqrt(2/π) · (x + 0.044715 · x³), of the numbers start to stop.

    (1 + tanh(u)) / 2 is sigmoid(2u). The buffer holds PIECE.
    """
    row = f32_at(buffer)
    for first in range(start, stop, PIECE):
        n = min(PIECE, stop - first)
        widen_row(x, is_bf16, first, n, row)
        for j in range(n):
            z = row[j]
            row[j] = z * sigmoid(_TWICE_SQRT_2_OVER_PI * z * (np.float32(1) + _CUBIC * z * z))
        narrow_row(row, y, is_bf16, first, n)


@CompiledFunction.with_options(fastmath=FASTMATH)
def gelu_tanh_backward(x: Any, gradient: Any, is_bf16: Any, grad_x: Any, start: Any, stop: Any, buffer: Any) -> None:
    """grad_x of the numbers start to stop; the buffer holds 2 · PIECE."""
    row, grad = f32_at(buffer), f32_at(buffer + 4 * PIECE)
    for first in range(start, stop, PIECE):
        n = min(PIECE, stop - first)
        widen_row(x, is_bf16, first, n, row)
        widen_row(gradient, is_bf16, first, n, grad)
        for j in range(n):
            z = row[j]
            s = sigmoid(_TWICE_SQRT_2_OVER_PI * z * (np.float32(1) + _CUBIC * z * z))
            inner = _TWICE_SQRT_2_OVER_PI * (np.float32(1) + np.float32(3) * _CUBIC * z * z)
            grad[j] *= s + z * s * (np.float32(1) - s) * inner
        narrow_row(grad, grad_x, is_bf16, first, n)


@CompiledFunction.with_options(fastmath=FASTMATH)
def swiglu_forward(gate_up: Any, is_bf16: Any, y: Any, start: Any, stop: Any, width: Any, buffer: Any) -> None:
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
def swiglu_backward(
    gate_up: Any, gradient: Any, is_bf16: Any, result: Any, start: Any, stop: Any, width: Any, buffer: Any
) -> None:
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
