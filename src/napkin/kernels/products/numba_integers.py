"""Products of vectors with rows of 4-bit or 8-bit integers in groups with scales, compiled for a CPU.

The numbers of a vector become integers too, of 16 bits: 32 of them, a piece, share a scale, their largest absolute
value over 32767. The sums of a piece are then exact in int32, and one conversion and one multiplication by both scales
is what a piece costs beside them; a number is off by at most 1/65534 of the largest of its piece.

    x · w = Σ over pieces: scale · (Σ q · n) · scale of the piece + offset · Σ x

Four rows at a time read the vector once. What a vector's product is does not depend on how many vectors there are.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from napkin.kernels.numba_numbers import FASTMATH, float_of_bits, larger, nearest_integer, widen_row, widened
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with
from napkin.machine_code.pointers import f32_at, i16_at, operation, u16_at

PIECE = 32
"""Numbers that share a scale in a vector, and that divide the groups of a matrix."""
BF16, FP32 = 0, 2
"""Formats of a matrix's scales and offsets; 1 is fp16."""

_ROWS = 4
_LARGEST = np.float32(32767)
_SMALLEST_PIECE = np.float32(1e-30)
_HALF_TO_SINGLE = np.float32(2.0**112)
"""The bits of an fp16 number, moved to where fp32 has exponent and fraction, are the number divided by this."""

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def _vector(kind: Any, n: int) -> Any:
    return ir.VectorType(kind, n)


def _dots(bits: int, zero: int, has_offsets: bool, n_rows: int) -> Any:
    """The operation that returns Σ scale · piece's scale · Σ (q - zero) · n + offset · Σ x for so many rows; scales and
    offsets, if any, are float32, one for each piece of each row.

    A row has 16 or 32 bytes per piece. In 4 bits, the even numbers of a piece are in the lower halves of its bytes, and
    the odd ones in the upper: the vector's even numbers stand before its odd ones.
    """

    def emit(
        builder: Any,
        values: Any,
        row_bytes: Any,
        numbers: Any,
        scales: Any,
        offsets: Any,
        vector_scales: Any,
        vector_sums: Any,
        n_pieces: Any,
    ) -> Any:
        int64 = values.type

        def load(address: Any, kind: Any) -> Any:
            loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
            loaded.align = 1
            return loaded

        def plus(address: Any, index: Any, step: int) -> Any:
            return builder.add(address, builder.mul(index, int64(step)))

        def all_are(value: int) -> Any:
            return ir.Constant(_vector(_I16, 16), [value] * 16)

        def pairs(left: Any, right: Any) -> Any:
            """left[2i] · right[2i] + left[2i + 1] · right[2i + 1] in int32: one instruction of x86."""
            wide = _vector(_I32, 16)
            product = builder.mul(builder.sext(left, wide), builder.sext(right, wide))
            even, odd = (
                builder.shuffle_vector(product, product, ir.Constant(_vector(_I32, 8), list(range(first, 16, 2))))
                for first in (0, 1)
            )
            return builder.add(even, odd)

        def integers(address: Any) -> tuple[Any, Any]:
            if bits == 8:
                return tuple(  # pyright: ignore[reportReturnType]
                    builder.sext(load(builder.add(address, int64(at)), _vector(ir.IntType(8), 16)), _vector(_I16, 16))
                    for at in (0, 16)
                )
            both = builder.zext(load(address, _vector(ir.IntType(8), 16)), _vector(_I16, 16))
            low, high = builder.and_(both, all_are(15)), builder.lshr(both, all_are(4))
            if zero:
                low, high = builder.sub(low, all_are(zero)), builder.sub(high, all_are(zero))
            return low, high

        sums_type = _vector(_F32, 8)

        def fused(kind: Any, suffix: str) -> Any:
            """a · b + c, in one instruction where the processor has it."""
            name = f"llvm.fmuladd.{suffix}"
            return builder.module.globals.get(name) or ir.Function(
                builder.module, ir.FunctionType(kind, [kind] * 3), name
            )

        of_vectors, of_numbers = fused(sums_type, "v8f32"), fused(_F32, "f32")
        scale_bytes = builder.mul(n_pieces, int64(4))
        rows, scale_rows, offset_rows = (
            [builder.add(first, builder.mul(step, int64(i))) for i in range(n_rows)]
            for first, step in ((values, row_bytes), (scales, scale_bytes), (offsets, scale_bytes))
        )
        before = builder.block
        loop, after = builder.append_basic_block("pieces"), builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        piece = builder.phi(int64)
        sums = [builder.phi(sums_type) for _ in range(n_rows)]
        shifts = [builder.phi(_F32) for _ in range(n_rows if has_offsets else 0)]
        first = load(plus(numbers, piece, 64), _vector(_I16, 16))
        second = load(builder.add(plus(numbers, piece, 64), int64(32)), _vector(_I16, 16))
        of_piece = load(plus(vector_scales, piece, 4), _F32)
        new, new_shifts = [], []
        if has_offsets:
            sum_of_piece = load(plus(vector_sums, piece, 4), _F32)
            for offset_row, shift in zip(offset_rows, shifts, strict=True):
                offset = load(plus(offset_row, piece, 4), _F32)
                new_shifts.append(builder.call(of_numbers, [offset, sum_of_piece, shift]))
        for row, scale_row, total in zip(rows, scale_rows, sums, strict=True):
            low, high = integers(plus(row, piece, 4 * bits))
            summed = builder.sitofp(builder.add(pairs(low, first), pairs(high, second)), sums_type)
            scale = builder.fmul(load(plus(scale_row, piece, 4), _F32), of_piece)
            alone = builder.insert_element(ir.Constant(sums_type, ir.Undefined), scale, ir.Constant(_I32, 0))
            spread = builder.shuffle_vector(alone, alone, ir.Constant(_vector(_I32, 8), [0] * 8))
            new.append(builder.call(of_vectors, [summed, spread, total]))
        following = builder.add(piece, int64(1))
        piece.add_incoming(int64(0), before)
        piece.add_incoming(following, loop)
        for total, next_total in zip([*sums, *shifts], [*new, *new_shifts], strict=True):
            zeros = [0.0] * 8 if total.type == sums_type else 0.0
            total.add_incoming(ir.Constant(total.type, zeros), before)
            total.add_incoming(next_total, loop)
        builder.cbranch(builder.icmp_signed("<", following, n_pieces), loop, after)
        builder.position_at_end(after)
        totals = []
        for i, vector in enumerate(new):
            for half in (4, 2, 1):
                upper = [i + half if i < half else 0 for i in range(8)]
                other = builder.shuffle_vector(vector, vector, ir.Constant(_vector(_I32, 8), upper))
                vector = builder.fadd(vector, other)
            total = builder.extract_element(vector, ir.Constant(_I32, 0))
            totals.append(builder.fadd(total, new_shifts[i]) if has_offsets else total)
        return totals if n_rows > 1 else totals[0]

    result = types.UniTuple(types.float32, n_rows) if n_rows > 1 else types.float32
    return operation(result, *[types.int64] * 8)(emit)


@jitted_with(fastmath=FASTMATH)
def _widen_scales(address, kind, start, n, to):
    """to[0:n] = the n scales or offsets from `start` on."""
    if kind == FP32:
        wide = f32_at(address)
        for j in range(n):
            to[j] = wide[start + j]
    elif kind == BF16:
        narrow = u16_at(address)
        for j in range(n):
            to[j] = widened(narrow[start + j])
    else:
        half = u16_at(address)
        for j in range(n):
            bits = np.int32(half[start + j])
            size = float_of_bits((bits & np.int32(0x7FFF)) << np.int32(13)) * _HALF_TO_SINGLE
            to[j] = -size if bits > np.int32(0x7FFF) else size


@jitted_with(fastmath=FASTMATH)
def _for_each_piece(groups, n_groups, pieces_per_group, pieces):
    """pieces = the number of each group, once for each piece of it."""
    for g in range(n_groups):
        for p in range(g * pieces_per_group, (g + 1) * pieces_per_group):
            pieces[p] = groups[g]


@jitted_with(fastmath=FASTMATH)
def _scales_of_pieces(address, kind, first, n_groups, pieces_per_group, pieces, buffer):
    """The scales, or offsets, of n_groups groups from `first` on, as one float32 for each piece."""
    if pieces_per_group == 1:
        _widen_scales(address, kind, first, n_groups, pieces)
    else:
        groups = f32_at(buffer)
        _widen_scales(address, kind, first, n_groups, groups)
        _for_each_piece(groups, n_groups, pieces_per_group, pieces)


@jitted_with(fastmath=FASTMATH)
def take_integers(row, n, n_pieces, in_halves, numbers, scales, sums):
    """The integers, scales and sums of the pieces of a row of n float32; beyond n it counts as 0.

    Where a number is not finite, its piece's scale and sum are not either, and so are the products.
    """
    for p in range(n_pieces):
        first = p * PIECE
        n_here = min(PIECE, n - first)
        largest, total = _SMALLEST_PIECE, np.float32(0)
        for j in range(n_here):
            largest = larger(largest, abs(row[first + j]))
            total += row[first + j]
        inverse = _LARGEST / largest
        if in_halves:
            for j in range(PIECE // 2):
                even = row[first + 2 * j] if 2 * j < n_here else np.float32(0)
                odd = row[first + 2 * j + 1] if 2 * j + 1 < n_here else np.float32(0)
                numbers[first + j] = np.int16(np.int32(nearest_integer(even * inverse)))
                numbers[first + PIECE // 2 + j] = np.int16(np.int32(nearest_integer(odd * inverse)))
        else:
            for j in range(PIECE):
                number = row[first + j] if j < n_here else np.float32(0)
                numbers[first + j] = np.int16(np.int32(nearest_integer(number * inverse)))
        scales[p] = largest / _LARGEST
        sums[p] = total


@CompiledFunction.with_options(fastmath=FASTMATH)
def vectors_to_integers(x, is_bf16, numbers, scales, sums, start, stop, n, n_pieces, in_halves, buffer):
    """The integers, scales and sums of the vectors start to stop, which have n numbers each. The buffer holds n."""
    row = f32_at(buffer)
    for i in range(start, stop):
        widen_row(x, is_bf16, i * n, n, row)
        take_integers(
            row,
            n,
            n_pieces,
            in_halves,
            i16_at(numbers + 2 * PIECE * n_pieces * i),
            f32_at(scales + 4 * n_pieces * i),
            f32_at(sums + 4 * n_pieces * i),
        )


def _products(bits: int, zero: int) -> Any:
    """The compiled loop over rows of integers of so many bits, of which `zero` is subtracted."""
    four, one = (_dots(bits, zero, False, n_rows) for n_rows in (_ROWS, 1))
    four_with_offsets, one_with_offsets = (_dots(bits, zero, True, n_rows) for n_rows in (_ROWS, 1))

    @jitted_with(fastmath=FASTMATH)
    def multiply(
        numbers, vector_scales, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces, n_groups,
        kind, y_row, buffer,
    ):  # fmt: skip
        """y[v, i] = the product of vector v and the row i, for the rows start to stop; y is float32 with y_row numbers
        per vector. Scales and offsets, 0 for none, are [row, n_groups] in the format `kind`. The buffer holds
        12 · n_pieces float32."""
        row_bytes = n_pieces * 4 * bits
        per_group = n_pieces // n_groups
        result = f32_at(y)
        wide, shifts, rest = buffer, buffer + 16 * n_pieces, buffer + 32 * n_pieces
        i = start
        while i < stop:
            n_rows = _ROWS if i + _ROWS <= stop else 1
            # The scales of consecutive rows stand one after the other.
            first, n = i * n_groups, n_rows * n_groups
            _scales_of_pieces(scales, kind, first, n, per_group, f32_at(wide), rest)
            if offsets:
                _scales_of_pieces(offsets, kind, first, n, per_group, f32_at(shifts), rest)
            at = values + i * row_bytes
            for v in range(n_vectors):
                x = numbers + 2 * PIECE * n_pieces * v
                of_x, sums_of_x = vector_scales + 4 * n_pieces * v, vector_sums + 4 * n_pieces * v
                place = v * y_row + i
                if n_rows == 1:
                    if offsets:
                        result[place] = one_with_offsets(at, row_bytes, x, wide, shifts, of_x, sums_of_x, n_pieces)
                    else:
                        result[place] = one(at, row_bytes, x, wide, shifts, of_x, sums_of_x, n_pieces)
                    continue
                if offsets:
                    a, b, c, d = four_with_offsets(at, row_bytes, x, wide, shifts, of_x, sums_of_x, n_pieces)
                else:
                    a, b, c, d = four(at, row_bytes, x, wide, shifts, of_x, sums_of_x, n_pieces)
                result[place] = a
                result[place + 1] = b
                result[place + 2] = c
                result[place + 3] = d
            i += n_rows

    return multiply


multiply_int8 = _products(8, 0)
multiply_int4 = _products(4, 0)
multiply_centred_int4 = _products(4, 8)

INT8, INT4 = 0, 1
"""The formats of a matrix: q from -128 to 127; q from 0 to 15; 2 is q from 0 to 15, minus 8."""


@jitted_with(fastmath=FASTMATH)
def multiply_rows(
    numbers, vector_scales, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces, n_groups,
    kind, y_row, form, buffer,
):  # fmt: skip
    """The products of the rows start to stop of a matrix in that form, see `_products`."""
    if form == INT8:
        multiply_int8(
            numbers, vector_scales, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces,
            n_groups, kind, y_row, buffer,
        )  # fmt: skip
    elif form == INT4:
        multiply_int4(
            numbers, vector_scales, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces,
            n_groups, kind, y_row, buffer,
        )  # fmt: skip
    else:
        multiply_centred_int4(
            numbers, vector_scales, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces,
            n_groups, kind, y_row, buffer,
        )  # fmt: skip


@CompiledFunction.with_options(fastmath=FASTMATH)
def multiply_integers(
    numbers, vector_scales, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces, n_groups,
    kind, y_row, form, buffer,
):  # fmt: skip
    """`multiply_rows`, for Python to call."""
    multiply_rows(
        numbers, vector_scales, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces, n_groups,
        kind, y_row, form, buffer,
    )  # fmt: skip
