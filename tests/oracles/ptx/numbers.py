"""The formats of PTX in NumPy, rounded as the PTX ISA promises: once per operation, to nearest, ties to even.

Operations that PTX calls approximate (ex2, lg2, div.full, sqrt.approx …) are computed in fp64 and rounded once: a GPU's
result may differ by the few units in the last place that the ISA allows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_SMALLEST_NORMAL = np.float32(2.0**-126)


def bits_of(kind: str) -> int:
    """The width of a type such as s32, bf16 or bf16x2; 1 of a predicate."""
    if kind == "pred":
        return 1
    return {"bf16": 16, "tf32": 32, "f16x2": 32, "bf16x2": 32}.get(kind) or int(kind[1:])


def unsigned(bits: int) -> type[Any]:
    return _UNSIGNED[bits]


def decode(raw: Numbers, kind: str) -> Numbers:
    """The numbers that the bits of a register stand for: of bf16 as fp32."""
    if kind == "pred":
        return raw
    raw = raw.astype(_UNSIGNED[bits_of(kind)], copy=False)
    if kind == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind in _FLOATS:
        return raw.view(_FLOATS[kind])
    return raw.view(_SIGNED[bits_of(kind)]) if kind[0] == "s" else raw


def encode(numbers: Numbers, kind: str, width: int) -> Numbers:
    """The bits of a register of that width that hold these numbers; signed ones are extended by their sign."""
    if kind == "pred":
        return numbers
    if kind == "bf16":
        return rounded_to_bf16(numbers).astype(_UNSIGNED[width], copy=False)
    if kind in _FLOATS:
        return (
            numbers.astype(_FLOATS[kind], copy=False)
            .view(_UNSIGNED[bits_of(kind)])
            .astype(_UNSIGNED[width], copy=False)
        )
    if kind[0] == "s":
        return (
            numbers.astype(_SIGNED[bits_of(kind)], copy=False).astype(_SIGNED[width], copy=False).view(_UNSIGNED[width])
        )
    return numbers.astype(_UNSIGNED[bits_of(kind)], copy=False).astype(_UNSIGNED[width], copy=False)


def rounded_to_bf16(numbers: Numbers) -> Numbers:
    """The bits of the nearest bf16, ties to even; every NaN becomes 0x7fff, as cvt makes it."""
    narrow = numbers.astype(np.float32, copy=False)
    raw = narrow.view(np.uint32)
    # A wider number that fp32 rounds to the middle between two bf16 is on one side of it.
    lost = np.where(raw & np.uint32(0xFFFF) == 0x8000, np.abs(numbers) - np.abs(narrow.astype(np.float64)), 0)
    raw = raw + np.sign(np.nan_to_num(lost)).astype(np.int32).view(np.uint32)
    nearest = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FFF), nearest).astype(np.uint16)


def rounded_to_fp8(numbers: Numbers, kind: str) -> Numbers:
    """The bits of the nearest e4m3 or e5m2, ties to even; beyond the largest it is the largest, and NaN is 0x7f."""
    mantissa, bias, largest = (3, 7, 0x7E) if kind == "e4m3" else (2, 15, 0x7B)
    size = np.abs(numbers.astype(np.float64))
    exponent = np.maximum(np.where(size == 0, -bias, np.frexp(size)[1] - 1), 1 - bias)
    units = np.rint(np.minimum(np.ldexp(size, mantissa - exponent), 2.0 ** (mantissa + 2)))
    # The leading bit of a number that is not subnormal adds 1 to the exponent before it.
    raw = np.minimum(units + np.ldexp(exponent + bias - 1.0, mantissa), largest)
    raw = np.where(np.isnan(size), 0x7F, raw).astype(np.uint16)
    return raw | (np.signbit(numbers).astype(np.uint16) << np.uint16(7))


def rounded_to_f16_towards_zero(numbers: Numbers) -> Numbers:
    nearest = numbers.astype(np.float16)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(numbers.astype(np.float64))
    return np.where(beyond, np.nextafter(nearest, np.float16(0)), nearest)


def fused_multiply_add(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """a · b + c of fp32, rounded once.

    The product is exact in fp64. A sum whose rounding to fp64 falls halfway between two fp32 is moved to the side of
    what it lost, so that the second rounding is that of the exact sum.
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    wide = c.astype(np.float64)
    total = product + wide
    raw = total.view(np.uint64)
    if ((raw & np.uint64(0x0FFFFFFF)) == 0).any():
        from_product = total - wide
        lost = (product - from_product) + (wide - (total - from_product))
        away = (lost != 0) & np.isfinite(lost)
        total = np.where(away, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return total.astype(np.float32)


def flushed(numbers: Numbers) -> Numbers:
    """Subnormal fp32 become zero of the same sign (.ftz)."""
    return np.where(np.abs(numbers) < _SMALLEST_NORMAL, np.copysign(np.float32(0), numbers), numbers)


def divided(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
    """Quotient, rounded towards zero, and remainder, with the sign of the dividend; by zero both are all ones."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    remainder = np.fmod(a, divisor)
    quotient = (a - remainder) // divisor
    ones = np.array(-1).astype(b.dtype)
    return np.where(zero, ones, quotient), np.where(zero, ones, remainder)


def permuted_bytes(a: Numbers, b: Numbers, selector: Numbers) -> Numbers:
    """prmt: each digit of the selector chooses one of the eight bytes of b and a, or (bit 3) repeats its sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(a)
    for place in range(4):
        digit = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (both >> ((digit & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7) != 0, np.uint64(255), np.uint64(0))
        byte = np.where(digit & np.uint32(8) != 0, sign, byte)
        result = result | (byte.astype(np.uint32) << np.uint32(8 * place))
    return result


def bit_field(a: Numbers, start: Numbers, length: Numbers, bits: int, *, signed: bool) -> Numbers:
    """bfe: some bits of a number; of a signed one the last of them is its sign."""
    start, length = (np.minimum(each & np.uint32(255), np.uint32(bits)).astype(np.int64) for each in (start, length))
    # Shifts of the full width are undefined in NumPy: Python's floor division by powers of two takes any.
    raw = np.where(start >= bits, a.dtype.type(0), a >> np.minimum(start, bits - 1).astype(a.dtype)).astype(np.int64)
    mask = np.where(length >= 64, -1, (np.int64(1) << np.minimum(length, 62)) - 1)
    field = raw & mask
    if signed:
        top = np.where(length > 0, (field >> np.maximum(length - 1, 0)) & 1, 0)
        field = field - (top << length)
    return field


def shifted(a: Numbers, by: Numbers, bits: int, *, left: bool) -> Numbers:
    """Shifts by the width or more leave zero, or the sign."""
    within = np.minimum(by, np.uint32(bits - 1)).astype(a.dtype)
    if left:
        return np.where(by >= bits, a.dtype.type(0), a << within)
    moved = a >> within
    return moved if a.dtype.kind == "i" else np.where(by >= bits, a.dtype.type(0), moved)
