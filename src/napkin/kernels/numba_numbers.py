"""Numbers in registers, and rows of them between memory and a float32 buffer that stays in the processor's cache.

A kernel widens a row of bf16 or float32 into its buffer, computes there, and narrows the result back: one loop for both
formats. The buffers belong to the thread that calls. What numba itself cannot express is an intrinsic.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from napkin.machine_code.compiled_function import jitted_with
from napkin.machine_code.pointers import called, f32_at, operation, u16_at

FASTMATH = {"reassoc", "contract", "nsz"}
"""Sums in any order, so that they run in vectors; NaN and infinity keep their meaning."""
AS_WRITTEN = False
"""The fastmath of functions whose sums are emitted in the order that they are to have: the same whatever else is in
registers. Without any a function has that of its first caller."""

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_SMALLEST = -87.0
"""e^x is a normal number down to here; below, its value here is returned, which is less than 1.7e-38."""
_LARGEST = 89.0
"""e^x is infinite from here on; from 88.4 on it is so here."""


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    """The result of LLVM's intrinsic of that name for float32 or vectors of them."""
    kind = arguments[0].type
    full_name = f"{name}.v{kind.count}f32" if isinstance(kind, ir.VectorType) else f"{name}.f32"
    return called(builder, full_name, kind, arguments)


def _each(kind: Any, value: float) -> Any:
    """A constant of a kind, in each place of a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _as_many(kind: Any, number: Any) -> Any:
    """A kind of number, or a vector of as many as `kind` has."""
    return ir.VectorType(number, kind.count) if isinstance(kind, ir.VectorType) else number


bf16_at = u16_at
"""The pointer of the address of bf16 numbers, to their bits."""
widened = operation("float32(uint16)")(lambda b, x: b.bitcast(b.shl(b.zext(x, _I32), _I32(16)), _F32))
"""The float32 of a bf16's bits."""
float_argument = operation("float32(int64)")(lambda b, x: b.bitcast(b.trunc(x, _I32), _F32))
"""The float32 whose bits are the lower half of an int64, as compiled functions are given them."""
nearest_integer = operation("float32(float32)")(lambda b, x: _call(b, "llvm.rint", x))
larger = operation("float32(float32, float32)")(lambda b, x, y: _call(b, "llvm.maximum", x, y))
"""The larger of two numbers; NaN if one of them is."""


def narrow_bits(builder: Any, x: Any) -> Any:
    """The bits of the nearest bf16 of float32 or of a vector of them, ties to even. A NaN whose bits are all set would
    become 0, but no processor makes one."""
    wide = _as_many(x.type, _I32)
    bits = builder.bitcast(x, wide)
    odd = builder.and_(builder.lshr(bits, _each(wide, 16)), _each(wide, 1))
    rounded = builder.add(builder.add(bits, _each(wide, 0x7FFF)), odd)
    return builder.trunc(builder.lshr(rounded, _each(wide, 16)), _as_many(x.type, _I16))


narrowed = operation("uint16(float32)")(narrow_bits)
"""The bits of the nearest bf16."""


def power_of_e(builder: Any, x: Any) -> Any:
    """`exponential` of float32 or of a vector of them."""
    kind, integers = x.type, _as_many(x.type, _I32)
    # Comparisons instead of max and min, which may lose a NaN.
    for sign, bound in (("<", _SMALLEST), (">", _LARGEST)):
        x = builder.select(builder.fcmp_ordered(sign, x, _each(kind, bound)), _each(kind, bound), x)
    whole = _call(builder, "llvm.rint", builder.fmul(x, _each(kind, _LOG2_E)))
    r = _call(builder, "llvm.fmuladd", whole, _each(kind, -_LN_2), x)
    # Taylor's series to r^6, |r| up to ln(2)/2: the first term left out is below 2^-22 of the sum.
    p = _each(kind, 1 / 720)
    for factor in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = _call(builder, "llvm.fmuladd", p, r, _each(kind, factor))
    exponent = builder.shl(builder.add(builder.fptosi(whole, integers), _each(integers, 127)), _each(integers, 23))
    return builder.fmul(p, builder.bitcast(exponent, kind))


exponential = operation("float32(float32)")(power_of_e)
"""e^x for x of -87 to 88, within 2 units in the last place; NaN of NaN. A call of the C library would not run in
vectors."""


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
def narrow_scaled_row(row, factor, address, is_bf16, start, n):
    """The n numbers from `start` on = factor · row[0:n]: a row that fills the first cache is read once for both."""
    if is_bf16:
        narrow = bf16_at(address)
        for j in range(n):
            narrow[start + j] = narrowed(factor * row[j])
    else:
        wide = f32_at(address)
        for j in range(n):
            wide[start + j] = factor * row[j]


@jitted_with(fastmath=FASTMATH)
def narrow_row(row, address, is_bf16, start, n):
    """The n numbers from `start` on = row[0:n]."""
    narrow_scaled_row(row, np.float32(1), address, is_bf16, start, n)


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
