"""Products of vectors with rows of 4-bit or 8-bit integers in groups with scales, compiled for a CPU.

The numbers of a vector become integers too, of 16 bits: 32 of them, a piece, share a scale, their largest absolute
value over 32767. The sums of a piece are then exact in int32, and one conversion and one multiplication by both scales
is what a piece costs beside them; a number is off by at most 1/65534 of the largest of its piece.

    x · w = Σ over pieces: (scale · Σ q · n + offset · Σ n) · scale of the piece

Four rows at a time read the vector once, and two vectors at a time the rows. What a vector's product is does not depend
on how many vectors there are.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from napkin.kernels.numba_numbers import AS_WRITTEN, FASTMATH, narrow_row, widen_row, widened
from napkin.kernels.products.numba_dots import (
    AHEAD,
    F32X8,
    apart,
    byte_dots,
    constants,
    fetch,
    fetch_ahead,
    folded,
    fused,
    looped,
    nibble_dots,
    plus,
    row_sums,
    spread,
    word_dots,
)
from napkin.kernels.products.numba_forms import BF16, FP32, GROUPED_INT4, INT4, INT8, PIECE, WHOLE_INT8
from napkin.kernels.products.numba_quantized import (
    ROWS,
    has_wide_bytes,
    has_wide_nibbles,
    is_wide,
    multiply_grouped,
    multiply_whole,
    spread_pieces,
    take_whole,
    vector_bytes,
)
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with, processor_features
from napkin.machine_code.pointers import called, f32_at, load, operation, store, u16_at

_LARGEST = 32767.0
_SMALLEST_PIECE = 1e-30
_HALF_TO_SINGLE = 2.0**112
"""The bits of an fp16 number, moved to where fp32 has exponent and fraction, are the number divided by this."""

_I8, _I16, _I32, _F16, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()


def _vector(kind: Any, n: int) -> Any:
    return ir.VectorType(kind, n)


def _pieces_of_planes(form: int) -> int:
    """The pieces of a vector that are multiplied at a time, and whose integers stand in planes together: of bytes of
    the row, 64 or 32. One for 16-bit integers side by side, which are multiplied by 8 bits without `is_wide`."""
    if form == INT8:
        return 2 if is_wide(8) else 1
    return 4 if is_wide(4) else 2


def _dots(form: int, has_offsets: bool, n_rows: int, n_vectors: int) -> Any:
    """The operation that writes Σ scale · piece's scale · Σ q · n + offset · Σ x of so many rows and vectors to an
    address; scales and offsets, if any, are float32, one for each piece of each row, and eight more may be read. The
    products of a vector are `to_step` bytes after those of the vector before it.

    A row has 16 or 32 bytes per piece. In 4 bits, the even numbers of a piece are in the lower halves of its bytes, and
    the odd ones in the upper. `_pieces_of_planes` pieces are multiplied at a time by what `take_integers` makes of
    them, and then those that are left, one by one.
    """
    piece_bytes = PIECE if form == INT8 else PIECE // 2

    def emit(
        builder: Any,
        values: Any,
        row_bytes: Any,
        numbers: Any,
        number_step: Any,
        scales: Any,
        offsets: Any,
        vector_scales: Any,
        vector_sums: Any,
        n_pieces: Any,
        to: Any,
        to_step: Any,
    ) -> None:
        int64, at_once = values.type, _pieces_of_planes(form)
        n_lanes = max(8, at_once * piece_bytes // 4)
        floats, plane = _vector(_F32, n_lanes), at_once * piece_bytes
        scale_bytes = builder.mul(n_pieces, int64(4))

        rows, scale_rows, offset_rows = (
            apart(builder, first, step, n_rows)
            for first, step in ((values, row_bytes), (scales, scale_bytes), (offsets, scale_bytes))
        )
        vectors, of_vectors, sums_of_vectors, results = (
            apart(builder, first, step, n_vectors)
            for first, step in (
                (numbers, number_step),
                (vector_scales, scale_bytes),
                (vector_sums, scale_bytes),
                (to, to_step),
            )
        )

        def row_part(address: Any, n_bytes: int) -> Any:
            """This many bytes of a row, followed by zeros."""
            part = load(builder, address, _vector(_I8, n_bytes))
            if n_bytes == plane:
                return part
            places = constants(_vector(_I32, plane), [*range(n_bytes), *[n_bytes] * (plane - n_bytes)])
            return builder.shuffle_vector(part, constants(part.type, 0), places)

        def dots_of(at: Any, n_bytes: int) -> Any:
            """Make the operation that sums the products of a row's bytes with the integers in planes from an address
            on."""
            if at_once == 1:
                parts = [load(builder, builder.add(at, int64(part)), _vector(_I16, 16)) for part in (0, 32)]

                def words(address: Any) -> Any:
                    halves = (load(builder, builder.add(address, int64(i)), _vector(_I8, 16)) for i in (0, 16))
                    return word_dots(builder, [builder.sext(each, _vector(_I16, 16)) for each in halves], parts)

                return words
            n_planes = 2 if form == INT8 else 4
            planes = [
                load(builder, builder.add(at, int64(plane * part)), _vector(_I8, plane)) for part in range(n_planes)
            ]
            if form == INT8:
                return byte_dots(builder, planes, lambda address: row_part(address, n_bytes))
            eights = constants(_vector(_I8, plane), 8)
            zeros = None if form == INT4 else nibble_dots(builder, eights, eights, planes)

            def nibbles(address: Any) -> Any:
                both = row_part(address, n_bytes)
                low = builder.and_(both, constants(both.type, 15))
                # A shift of words is an instruction of x86, one of bytes is not.
                words = builder.bitcast(both, _vector(_I16, plane // 2))
                shifted = builder.bitcast(builder.lshr(words, constants(words.type, 4)), both.type)
                high = builder.and_(shifted, constants(both.type, 15))
                dot = nibble_dots(builder, low, high, planes)
                return dot if zeros is None else builder.sub(dot, zeros)

            return nibbles

        def add_pieces(piece: Any, offset: Any, n: int, totals: list[Any]) -> list[Any]:
            """The totals with n pieces from one on, whose integers begin so many bytes after a vector's first."""
            n_bytes = n * piece_bytes
            fetch_ahead(builder, plus(builder, values, piece, piece_bytes * n_rows), n_bytes * n_rows)
            new_totals = list[Any]()
            for vector, of_vector in zip(vectors, of_vectors, strict=True):
                dots = dots_of(builder.add(vector, offset), n_bytes)
                sums = [dots(plus(builder, row, piece, piece_bytes)) for row in rows]
                factors = load(builder, plus(builder, of_vector, piece, 4), _vector(_F32, n))
                for row, dot in zip(scale_rows, sums, strict=True):
                    of_row = load(builder, plus(builder, row, piece, 4), _vector(_F32, n))
                    factor, total = in_lanes(builder.fmul(of_row, factors), n), totals[len(new_totals)]
                    new_totals.append(
                        builder.call(fused(builder, floats), [builder.sitofp(dot, floats), factor, total])
                    )
            return new_totals

        def in_lanes(factors: Any, n: int) -> Any:
            """The factors of n pieces in the lanes of their sums, and 0 in the others."""
            per_piece = n_lanes // at_once
            places = [place for place in range(n) for _ in range(per_piece)] + [n] * (n_lanes - n * per_piece)
            return builder.shuffle_vector(
                factors, constants(factors.type, 0.0), constants(_vector(_I32, n_lanes), places)
            )

        count = int64(at_once)
        wholes = builder.udiv(n_pieces, count)

        def whole(index: Any, totals: list[Any]) -> list[Any]:
            return add_pieces(builder.mul(index, count), builder.mul(index, int64(64 * at_once)), at_once, totals)

        left = builder.urem(n_pieces, count)

        def left_over(n: int, first: Any) -> Any:
            """What adds n pieces of those that are left, from one of them on."""

            def add(index: Any, totals: list[Any]) -> list[Any]:
                at = plus(builder, builder.mul(wholes, int64(64 * at_once)), first, piece_bytes)
                return add_pieces(builder.add(builder.mul(wholes, count), first), at, n, totals)

            return add

        totals = looped(builder, wholes, [constants(floats, 0.0)] * (n_rows * n_vectors), whole)
        if at_once == 4:
            totals = looped(builder, builder.lshr(left, int64(1)), totals, left_over(2, int64(0)))
        if at_once > 1:
            one, before = builder.and_(left, int64(1)), builder.and_(left, int64(-2))
            totals = looped(builder, one, totals, left_over(1, before))
        totals = [folded(builder, total) for total in totals]
        if has_offsets:

            def add_offsets(chunk: Any, totals: list[Any]) -> list[Any]:
                piece = builder.shl(chunk, int64(3))
                left = spread(builder, builder.trunc(builder.sub(n_pieces, piece), _I32), 8)
                inside = builder.icmp_signed(">", left, constants(left.type, list(range(8))))
                shifts = [load(builder, plus(builder, row, piece, 4), F32X8) for row in offset_rows]
                # The memory after the last piece may contain NaN.
                shifts = [builder.select(inside, each, constants(F32X8, 0.0)) for each in shifts]
                new_totals = list[Any]()
                for of_vector in sums_of_vectors:
                    sums = load(builder, plus(builder, of_vector, piece, 4), F32X8)
                    sums = builder.select(inside, sums, constants(F32X8, 0.0))
                    new_totals += [
                        builder.call(fused(builder, F32X8), [shift, sums, total])
                        for shift, total in zip(shifts, totals[len(new_totals) :][:n_rows], strict=True)
                    ]
                return new_totals

            chunks = builder.lshr(builder.add(n_pieces, int64(7)), int64(3))
            totals = looped(builder, chunks, totals, add_offsets)
        for vector, address in enumerate(results):
            result = row_sums(builder, totals[vector * n_rows :][:n_rows])
            store(builder, address, result)

    return operation("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")(emit)


def _widen_halves(n: int) -> Any:
    """The operation that writes the float32 of so many fp16 numbers, from one address to another."""

    def emit(builder: Any, address: Any, to: Any) -> None:
        # Each ARM of 64 bits converts them.
        if not processor_features().isdisjoint({"f16c", "fp-armv8"}):
            wide = builder.fpext(load(builder, address, _vector(_F16, n)), _vector(_F32, n))
        else:
            words = _vector(_I32, n)
            bits = builder.zext(load(builder, address, _vector(_I16, n)), words)
            size = builder.shl(builder.and_(bits, constants(words, 0x7FFF)), constants(words, 13))
            scaled = builder.fmul(builder.bitcast(size, _vector(_F32, n)), constants(_vector(_F32, n), _HALF_TO_SINGLE))
            # The largest exponent is that of infinity and NaN.
            is_finite = builder.icmp_unsigned("<", size, constants(words, 0x7C00 << 13))
            exponent = builder.select(is_finite, constants(words, 0), constants(words, 0x7F800000))
            sign = builder.shl(builder.and_(bits, constants(words, 0x8000)), constants(words, 16))
            found = builder.or_(builder.or_(builder.bitcast(scaled, words), exponent), sign)
            wide = builder.bitcast(found, _vector(_F32, n))
        store(builder, to, wide)

    return operation("void(int64, int64)")(emit)


_widen_eight, _widen_four, _widen_one = _widen_halves(8), _widen_halves(4), _widen_halves(1)


@jitted_with(fastmath=FASTMATH)
def _widen_scales(address, kind, start, n, to):
    """The n scales or offsets from `start` on, as float32 at the address `to`."""
    made = f32_at(to)
    if kind == FP32:
        wide = f32_at(address)
        for j in range(n):
            made[j] = wide[start + j]
    elif kind == BF16:
        narrow = u16_at(address)
        for j in range(n):
            made[j] = widened(narrow[start + j])
    else:
        halves = address + 2 * start
        eights, fours = n // 8 * 8, n // 4 * 4
        for j in range(0, eights, 8):
            _widen_eight(halves + 2 * j, to + 4 * j)
        for j in range(eights, fours, 4):
            _widen_four(halves + 2 * j, to + 4 * j)
        for j in range(fours, n):
            _widen_one(halves + 2 * j, to + 4 * j)


def _repeat(times: int) -> Any:
    """The operation that writes the float32 of eight bf16 numbers, each so many times, from one address to another."""

    def emit(builder: Any, address: Any, to: Any) -> None:
        bits = builder.zext(load(builder, address, _vector(_I16, 8)), _vector(_I32, 8))
        wide = builder.bitcast(builder.shl(bits, constants(bits.type, 16)), F32X8)
        places = [number for number in range(8) for _ in range(times)]
        for first in range(0, 8 * times, 8):
            part = builder.shuffle_vector(wide, wide, constants(_vector(_I32, 8), places[first : first + 8]))
            at = builder.add(to, address.type(4 * first))
            store(builder, at, part)

    return operation("void(int64, int64)")(emit)


_repeat_twice, _repeat_four_times = _repeat(2), _repeat(4)


@jitted_with(fastmath=FASTMATH)
def _scales_of_pieces(address, kind, first, n_groups, pieces_per_group, pieces, buffer):
    """The scales, or offsets, of n_groups groups from `first` on, as one float32 for each piece."""
    if pieces_per_group == 1:
        _widen_scales(address, kind, first, n_groups, pieces)
        return
    if kind == BF16 and pieces_per_group in (2, 4) and n_groups >= 8:
        for eight in range(0, n_groups, 8):
            # The last eight may overlap those before them.
            g = min(eight, n_groups - 8)
            if pieces_per_group == 2:
                _repeat_twice(address + 2 * (first + g), pieces + 8 * g)
            else:
                _repeat_four_times(address + 2 * (first + g), pieces + 16 * g)
        return
    _widen_scales(address, kind, first, n_groups, buffer)
    groups, repeated = f32_at(buffer), f32_at(pieces)
    for g in range(n_groups):
        for p in range(g * pieces_per_group, (g + 1) * pieces_per_group):
            repeated[p] = groups[g]


def _whole_piece(form: int) -> Any:
    """The operation that makes integers of the 32 float32 of a piece, and writes its scale and sum.

    They are 16-bit integers side by side, or in planes: the upper bytes of all numbers of the pieces that stand
    together, and their lower bytes; for 4 bits those of the even numbers, and then those of the odd ones.
    """

    def emit(builder: Any, row: Any, piece: Any, numbers: Any, scales: Any, sums: Any) -> None:
        int64, floats, words = row.type, _vector(_F32, PIECE), _vector(_I32, PIECE)
        at_once = _pieces_of_planes(form)

        x = load(builder, plus(builder, row, piece, 4 * PIECE), floats)
        # As integers the bits of sizes are in their order, infinity and then NaN above all numbers.
        sizes = builder.and_(builder.bitcast(x, words), constants(words, 0x7FFFFFFF))
        bits = called(builder, "llvm.vector.reduce.umax.v32i32", _I32, [sizes])
        least = builder.bitcast(_F32(_SMALLEST_PIECE), _I32)
        bits = builder.select(builder.icmp_unsigned("<", bits, least), least, bits)
        largest = builder.bitcast(bits, _F32)
        inverse = spread(builder, builder.fdiv(_F32(_LARGEST), largest), PIECE)
        whole = called(builder, "llvm.rint.v32f32", floats, [builder.fmul(x, inverse)])
        integers = builder.fptosi(whole, words)
        if at_once == 1:
            store(builder, plus(builder, numbers, piece, 64), builder.trunc(integers, _vector(_I16, PIECE)))
        else:
            count, bytes_of_piece = int64(at_once), PIECE if form == INT8 else PIECE // 2
            together, place = builder.udiv(piece, count), builder.urem(piece, count)
            at = plus(builder, plus(builder, numbers, together, 64 * at_once), place, bytes_of_piece)
            step = 1 if form == INT8 else 2
            for first in range(step):
                places = constants(_vector(_I32, PIECE // step), list(range(first, PIECE, step)))
                part = builder.shuffle_vector(integers, integers, places)
                for half, plane in enumerate((builder.ashr(part, constants(part.type, 8)), part)):
                    to = builder.add(at, int64(at_once * bytes_of_piece * (2 * first + half)))
                    store(builder, to, builder.trunc(plane, _vector(_I8, PIECE // step)))
        scale = builder.fdiv(largest, _F32(_LARGEST))
        store(builder, plus(builder, scales, piece, 4), scale)
        # Of the rounded numbers: an offset times what rounding took away would be off by more than the products.
        total = called(builder, "llvm.vector.reduce.fadd.v32f32", _F32, [_F32(0.0), whole], fastmath=("reassoc",))
        store(builder, plus(builder, sums, piece, 4), builder.fmul(total, scale))

    return operation("void(int64, int64, int64, int64, int64)")(emit)


_piece_for_4_bits, _piece_for_8_bits = _whole_piece(INT4), _whole_piece(INT8)


@jitted_with(fastmath=FASTMATH)
def take_integers(row, n, n_pieces, n_groups, form, numbers, scales, sums):
    """The integers, scales and sums of the pieces of a row of n float32, for a matrix in that form; beyond n it counts
    as 0, and is overwritten, up to pairs of pieces.

    All are addresses, the row's too; integers take `vector_bytes`, and sums are read in eights. Where a number is not
    finite, its piece's scale and sum are not either, and so are the products.
    """
    if form == WHOLE_INT8 and has_wide_bytes():
        take_whole(row, n, n_pieces, numbers, scales)
        return
    given = f32_at(row)
    for j in range(n, n_pieces * PIECE):
        given[j] = np.float32(0)
    for p in range(n_pieces):
        if form in (INT8, WHOLE_INT8):
            _piece_for_8_bits(row, p, numbers, scales, sums)
        else:
            _piece_for_4_bits(row, p, numbers, scales, sums)
    if form == GROUPED_INT4 and has_wide_nibbles():
        spread_pieces(n_pieces, n_pieces // n_groups, numbers, scales, sums)


def _products(form: int) -> Any:
    """Compile the loop over rows of integers of that form."""
    by_two, four, one = (_dots(form, False, *sizes) for sizes in ((ROWS, 2), (ROWS, 1), (1, 1)))
    by_two_with_offsets, four_with_offsets, one_with_offsets = (
        _dots(form, True, *sizes) for sizes in ((ROWS, 2), (ROWS, 1), (1, 1))
    )
    piece_bytes = PIECE if form == INT8 else PIECE // 2

    @jitted_with(fastmath=AS_WRITTEN)
    def multiply(
        numbers, vector_scales, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces, n_groups,
        kind, y_row, buffer,
    ):  # fmt: skip
        """y[v, i] = the product of vector v and the row i, for the rows start to stop; y is float32 with y_row numbers
        per vector. Scales and offsets, 0 for none, are [row, n_groups] in the format `kind`. The buffer holds
        12 · n_pieces + 16 float32."""
        row_bytes, step = n_pieces * piece_bytes, vector_bytes(n_pieces)
        per_group = n_pieces // n_groups
        # Eight numbers behind the scales and the offsets may be read.
        number = 4 if kind == FP32 else 2
        ahead = AHEAD // row_bytes // ROWS * ROWS + ROWS
        wide, shifts, rest = buffer, buffer + 16 * n_pieces, buffer + 32 * n_pieces + 32
        i = start
        while i < stop:
            n_rows = ROWS if i + ROWS <= stop else 1
            # The scales of consecutive rows are contiguous.
            first, n = i * n_groups, n_rows * n_groups
            later = number * (first + ahead * n_groups)
            fetch(scales + later, number * n)
            if offsets:
                fetch(offsets + later, number * n)
            _scales_of_pieces(scales, kind, first, n, per_group, wide, rest)
            if offsets:
                _scales_of_pieces(offsets, kind, first, n, per_group, shifts, rest)
            at = values + i * row_bytes
            v, to_step = 0, 4 * y_row
            while v < n_vectors:
                x = numbers + step * v
                of_x, sums_of_x = vector_scales + 4 * n_pieces * v, vector_sums + 4 * n_pieces * v
                to = y + 4 * (v * y_row + i)
                if n_rows == 1:
                    if offsets:
                        one_with_offsets(at, row_bytes, x, step, wide, shifts, of_x, sums_of_x, n_pieces, to, to_step)
                    else:
                        one(at, row_bytes, x, step, wide, shifts, of_x, sums_of_x, n_pieces, to, to_step)
                    v += 1
                elif v + 2 <= n_vectors:
                    if offsets:
                        by_two_with_offsets(
                            at, row_bytes, x, step, wide, shifts, of_x, sums_of_x, n_pieces, to, to_step
                        )
                    else:
                        by_two(at, row_bytes, x, step, wide, shifts, of_x, sums_of_x, n_pieces, to, to_step)
                    v += 2
                else:
                    if offsets:
                        four_with_offsets(at, row_bytes, x, step, wide, shifts, of_x, sums_of_x, n_pieces, to, to_step)
                    else:
                        four(at, row_bytes, x, step, wide, shifts, of_x, sums_of_x, n_pieces, to, to_step)
                    v += 1
            i += n_rows

    return multiply


multiply_int8, multiply_int4, multiply_centred_int4 = (_products(form) for form in range(3))


@jitted_with(fastmath=FASTMATH)
def multiply_rows(
    numbers, vector_scales, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces, n_groups,
    kind, y_row, form, buffer,
):  # fmt: skip
    """The products of the rows start to stop of a matrix in that form, see `_products`."""
    if form == WHOLE_INT8 and has_wide_bytes():
        multiply_whole(numbers, vector_scales, values, scales, y, start, stop, n_vectors, n_pieces, y_row)
    elif form == GROUPED_INT4 and has_wide_nibbles():
        multiply_grouped(
            numbers, vector_sums, values, scales, offsets, y, start, stop, n_vectors, n_pieces, n_groups, y_row
        )
    elif form in (INT8, WHOLE_INT8):
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


@jitted_with(inline="always")
def _of_vectors(integers, n_vectors, n_pieces):
    """Where scales and sums of vectors stand behind their integers."""
    scales = integers + vector_bytes(n_pieces) * n_vectors + 64
    return scales, scales + 4 * n_pieces * n_vectors


@jitted_with(fastmath=FASTMATH)
def _take_vectors(x, is_bf16, integers, start, stop, n_vectors, n, n_pieces, n_groups, form, row):
    """The integers, scales and sums of the vectors start to stop of n numbers, by a row of n_pieces + 1 pieces."""
    scales, sums = _of_vectors(integers, n_vectors, n_pieces)
    for v in range(start, stop):
        widen_row(x, is_bf16, v * n, n, f32_at(row))
        take_integers(
            row, n, n_pieces, n_groups, form, integers + vector_bytes(n_pieces) * v, scales + 4 * n_pieces * v,
            sums + 4 * n_pieces * v,
        )  # fmt: skip


@CompiledFunction.with_options(fastmath=FASTMATH)
def vectors_to_integers(x, is_bf16, integers, start, stop, n_vectors, n, n_pieces, n_groups, form, buffer):
    """The integers of the vectors start to stop, with scales and sums, as `multiply_few` takes them. They take 26
    float32 per piece of each vector, 136 more per vector, and 24 more; the buffer holds n_pieces + 1 whole pieces."""
    _take_vectors(x, is_bf16, integers, start, stop, n_vectors, n, n_pieces, n_groups, form, buffer)


@CompiledFunction.with_options(fastmath=FASTMATH)
def multiply_few(
    x, is_bf16, integers, values, scales, offsets, bias, bias_is_bf16, y, start, stop, n_vectors, n, n_pieces, n_groups,
    kind, form, y_row, block, buffer,
):  # fmt: skip
    """`multiply_rows` of vectors of n numbers, and biases if any, in the vectors' format: all in one call. Where
    `integers` is 0, each thread makes them for itself. The products of `block` rows are held in float32 before they
    are rounded. The buffer holds `block` float32 per vector and `block` more, 12 and a whole piece for each of
    n_pieces + 1, and what the vectors' integers take."""
    row, result = buffer, buffer + 4 * PIECE * (n_pieces + 1)
    biases = result + 4 * block * n_vectors
    rest = biases + 4 * block
    numbers = integers
    if not integers:
        numbers = rest + 4 * (12 * n_pieces + 16)
        _take_vectors(x, is_bf16, numbers, 0, n_vectors, n_vectors, n, n_pieces, n_groups, form, row)
    of_x, sums_of_x = _of_vectors(numbers, n_vectors, n_pieces)
    wide, shifts = f32_at(result), f32_at(biases)
    for first in range(start, stop, block):
        last = min(first + block, stop)
        multiply_rows(
            numbers, of_x, sums_of_x, values, scales, offsets, result - 4 * first, first, last, n_vectors, n_pieces,
            n_groups, kind, block, form, rest,
        )  # fmt: skip
        if bias:
            widen_row(bias, bias_is_bf16, first, last - first, shifts)
        for v in range(n_vectors):
            if bias:
                for i in range(last - first):
                    wide[v * block + i] += shifts[i]
            narrow_row(f32_at(result + 4 * block * v), y, is_bf16, v * y_row + first, last - first)
