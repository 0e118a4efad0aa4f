"""Numbers in registers, and rows of them between memory and a float32 buffer that stays in the processor's cache.

A kernel widens a row of bf16 or float32 into its buffer, computes there, and narrows the result back: one loop for both
formats. The buffers belong to the thread that calls. What numba itself cannot express is an intrinsic.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from napkin.machine_code.compiled_function import jitted_with
from napkin.machine_code.pointers import f32_at, operation, u16_at

FASTMATH = {"reassoc", "contract", "nsz"}
"""Sums in any order, so that they run in vectors; NaN and infinity keep their meaning."""

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)
_SMALLEST = np.float32(-87.0)
"""e^x is a normal number down to here; below, its value here is returned, which is less than 1.7e-38."""
_LARGEST = np.float32(89.0)
"""e^x is infinite from here on; from 88.4 on it is so here."""


def _called(name: str) -> Any:
    """LLVM's float32 intrinsic of that name."""

    def emit(builder: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(_F32, [_F32] * len(arguments))
        return builder.call(builder.module.declare_intrinsic(name, [_F32], kind), arguments)

    return emit


def _constant(value: int) -> Any:
    return ir.Constant(_I32, value)


bf16_at = u16_at
"""The pointer of the address of bf16 numbers, to their bits."""
widened = operation(types.float32, types.uint16)(lambda b, x: b.bitcast(b.shl(b.zext(x, _I32), _constant(16)), _F32))
"""The float32 of a bf16's bits."""
float_of_bits = operation(types.float32, types.int32)(lambda b, x: b.bitcast(x, _F32))
float_argument = operation(types.float32, types.int64)(lambda b, x: b.bitcast(b.trunc(x, _I32), _F32))
"""The float32 whose bits are the lower half of an int64, as compiled functions are given them."""
nearest_integer = operation(types.float32, types.float32)(_called("llvm.rint"))
larger = operation(types.float32, types.float32, types.float32)(_called("llvm.maximum"))
"""The larger of two numbers; NaN if one of them is."""


@operation(types.uint16, types.float32)
def narrowed(builder: Any, x: Any) -> Any:
    """The bits of the nearest bf16, ties to even. A NaN whose bits are all set would become 0, but no processor makes
    one."""
    bits = builder.bitcast(x, _I32)
    odd = builder.and_(builder.lshr(bits, _constant(16)), _constant(1))
    rounded = builder.add(builder.add(bits, _constant(0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, _constant(16)), _I16)


@jitted_with(fastmath=FASTMATH, inline="always")
def exponential(x):
    """e^x for x of -87 to 88, within 2 units in the last place; NaN of NaN. A call of the C library would not run in
    vectors."""
    # Comparisons instead of max and min, which may lose a NaN.
    x = _SMALLEST if x < _SMALLEST else x  # noqa: FURB136
    x = _LARGEST if x > _LARGEST else x  # noqa: FURB136
    whole = nearest_integer(x * _LOG2_E)
    r = x - whole * _LN_2
    # Taylor's series to r^6, |r| up to ln(2)/2: the first term left out is below 2^-22 of the sum.
    p = np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@jitted_with(fastmath=FASTMATH, inline="always")
def sigmoid(x):
    """1 / (1 + e^-x), within 2e-7; NaN of NaN."""
    return np.float32(1) / (np.float32(1) + exponential(-x))


@jitted_with(fastmath=FASTMATH, inline="always")
def hyperbolic_tangent(x):
    """tanh(x), within 3e-7; NaN of NaN."""
    return np.float32(2) * sigmoid(np.float32(2) * x) - np.float32(1)


@jitted_with(fastmath=FASTMATH)
def widen_row(address, is_bf16, start, n, row):
    """row[0:n] = the n numbers from `start` on."""
    if is_bf16:
        narrow = bf16_at(address)
        for j in range(n):
            row[j] = widened(narrow[start + j])
    else:
        wide = f32_at(address)
        for j in range(n):
            row[j] = wide[start + j]


@jitted_with(fastmath=FASTMATH)
def narrow_row(row, address, is_bf16, start, n):
    """The n numbers from `start` on = row[0:n]."""
    if is_bf16:
        narrow = bf16_at(address)
        for j in range(n):
            narrow[start + j] = narrowed(row[j])
    else:
        wide = f32_at(address)
        for j in range(n):
            wide[start + j] = row[j]


@jitted_with(fastmath=FASTMATH)
def zero_row(address, is_bf16, start, n):
    """The n numbers from `start` on = 0."""
    if is_bf16:
        narrow = bf16_at(address)
        for j in range(n):
            narrow[start + j] = np.uint16(0)
    else:
        wide = f32_at(address)
        for j in range(n):
            wide[start + j] = np.float32(0)


@jitted_with(fastmath=FASTMATH)
def exponentiate_row(row, n):
    """row[0:n] = e^(row - its largest); the largest, and the sum of the exponentials."""
    largest = np.float32(-np.inf)
    for j in range(n):
        largest = larger(largest, row[j])
    total = np.float32(0)
    for j in range(n):
        e = exponential(row[j] - largest)
        row[j] = e
        total += e
    return largest, total
