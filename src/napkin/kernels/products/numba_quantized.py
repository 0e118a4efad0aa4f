"""Products of vectors with rows of integers as `napkin quantize` writes them, 64 bytes at a time, compiled for a CPU.

8 bits with one scale per row: a vector becomes integers n of 24 bits with one scale, its largest absolute value over
127 · 2^16, in three planes of signed bytes. Each plane is multiplied and summed in int32 along the whole row, which is
exact up to 2^15 pieces, and nothing is converted before the end; a number is off by at most 2^-22 of the largest:

    x · w = scale of the vector · scale of the row · Σ over planes: 256^plane · Σ q · n

The instruction takes q + 128, so the sums begin at -128 · Σ n.

4 bits in groups with scales and middles in bf16: the vector's integers are those of numba_integers.py, 16 bits with a
scale for 32 of them, which is written once for each place in a register. Scales and middles are read as they stand:

    x · w = Σ over pieces: scale · (scale of the piece · Σ q · n) + Σ over groups: (middle - 8 · scale) · Σ x
"""

from typing import Any, Literal

from llvmlite import ir

from napkin.kernels.numba_numbers import AS_WRITTEN, FASTMATH
from napkin.kernels.products.numba_dots import (
    AHEAD,
    F32X8,
    add_products,
    apart,
    constants,
    fetch,
    fetch_ahead,
    folded,
    fused,
    looped,
    nibble_dots,
    plus,
    prefetch,
    row_sums,
    spread,
    store_apart,
)
from napkin.kernels.products.numba_forms import PIECE
from napkin.machine_code.compiled_function import jitted_with, processor_features
from napkin.machine_code.pointers import called, f32_at, load, operation, store

ROWS = 4
"""Rows that are multiplied side by side."""
_STAYS = 4096
"""Bytes of a vector's planes that stay in the first cache from row to row, as weights stream through it: with more the
processor reads planes and rows from the second, and no longer foresees the rows."""
_AHEAD_IN_ROW = 2048
"""Bytes ahead of those that are multiplied that rows are fetched, each in its quarter, where planes do not stay."""
_LARGEST = 127.0 * 2**16
_SMALLEST = 1e-30
_HEAD = 192
"""Bytes of the sums, a register for each plane, before a vector's planes of three."""

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_BYTES, _SUMS, _FLOATS = ir.VectorType(_I8, 64), ir.VectorType(_I32, 16), ir.VectorType(_F32, 16)


def is_wide(bits: int) -> bool:
    """True if the processor multiplies 64 bytes in an instruction: unsigned bytes of at most 15, as 4 bits are, also
    without VNNI."""
    return {"avx512f", "avx512bw", "avx512vl", *(["avx512vnni"] if bits == 8 else [])} <= processor_features()


def _is_wide(bits: int) -> Any:
    """`is_wide` as 1 or 0, for compiled functions."""
    return operation("int64()")(lambda builder: ir.IntType(64)(int(is_wide(bits))))


has_wide_bytes, has_wide_nibbles = _is_wide(8), _is_wide(4)


@jitted_with(inline="always")
def vector_bytes(n_pieces):
    """The bytes of a vector's integers in any form; 64 more may be read."""
    return 96 * ((n_pieces + 3) // 4 * 4) + 256


def _widened(builder: Any, address: Any, n: int) -> Any:
    """n bf16 as float32."""
    words = ir.VectorType(_I32, n)
    bits = builder.zext(load(builder, address, ir.VectorType(_I16, n)), words)
    return builder.bitcast(builder.shl(bits, constants(words, 16)), ir.VectorType(_F32, n))


def _half(builder: Any, address: Any) -> Any:
    """32 bytes, followed by zeros."""
    part = load(builder, address, ir.VectorType(_I8, 32))
    places = constants(ir.VectorType(_I32, 64), [*range(32), *[32] * 32])
    return builder.shuffle_vector(part, constants(part.type, 0), places)


@operation("void(int64, int64, int64, int64)")
def _three_planes(builder: Any, row: Any, n_pieces: Any, numbers: Any, scale: Any) -> None:
    """Write the integers of a row of float32, which whole pairs of pieces fill, in planes, and the row's scale."""
    if not is_wide(8):
        return
    int64 = row.type

    steps = builder.lshr(builder.add(n_pieces, int64(1)), int64(1))
    least = builder.bitcast(_F32(_SMALLEST), _I32)

    def larger(first: Any, second: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", first, second), first, second)

    def larger_sizes(index: Any, largest: list[Any]) -> list[Any]:
        step, sizes = plus(builder, row, index, 256), list[Any]()
        for part in range(4):
            # As integers the bits of sizes are in their order, infinity and then NaN above all numbers.
            bits = load(builder, builder.add(step, int64(64 * part)), _SUMS)
            sizes.append(builder.and_(bits, constants(_SUMS, 0x7FFFFFFF)))
        return list(map(larger, sizes, largest))

    parts = looped(builder, steps, [spread(builder, least, 16)] * 4, larger_sizes)
    bits = larger(larger(parts[0], parts[1]), larger(parts[2], parts[3]))
    largest = builder.bitcast(called(builder, "llvm.vector.reduce.umax.v16i32", _I32, [bits]), _F32)
    store(builder, scale, builder.fdiv(largest, _F32(_LARGEST)))
    inverse = spread(builder, builder.fdiv(_F32(_LARGEST), largest), 16)
    middle = constants(_BYTES, -128)

    def planes(index: Any, sums: list[Any]) -> list[Any]:
        digits: list[list[Any]] = [[], [], []]
        for part in range(4):
            address = builder.add(plus(builder, row, index, 256), int64(64 * part))
            scaled = builder.fmul(load(builder, address, _FLOATS), inverse)
            n = builder.fptosi(called(builder, "llvm.rint.v16f32", _FLOATS, [scaled]), _SUMS)
            for digit in digits:
                digit.append(builder.trunc(n, ir.VectorType(_I8, 16)))
                # What is left of n without the digit, which is signed.
                n = builder.ashr(builder.add(n, constants(_SUMS, 128)), constants(_SUMS, 8))
        at, new_sums = plus(builder, builder.add(numbers, int64(_HEAD)), index, 192), list[Any]()
        for place, (digit, total) in enumerate(zip(digits, sums, strict=True)):
            halves = [
                builder.shuffle_vector(a, b, constants(ir.VectorType(_I32, 32), list(range(32))))
                for a, b in (digit[:2], digit[2:])
            ]
            plane = builder.shuffle_vector(*halves, constants(ir.VectorType(_I32, 64), list(range(64))))
            store(builder, builder.add(at, int64(64 * place)), plane)
            new_sums.append(add_products(builder, total, middle, plane))
        return new_sums

    sums = looped(builder, steps, [constants(_SUMS, 0)] * 3, planes)
    for place, total in enumerate(sums):
        store(builder, builder.add(numbers, int64(64 * place)), builder.sub(constants(_SUMS, 0), total))


@jitted_with(fastmath=FASTMATH)
def take_whole(row, n, n_pieces, numbers, scale):
    """The integers of a row of n float32 in three planes, and its scale; all are addresses. Numbers from n on, up to
    pairs of pieces, count as 0, and are overwritten. If a number is not finite, the scale is not either."""
    given = f32_at(row)
    for j in range(n, (n_pieces + 1) // 2 * 2 * PIECE):
        given[j] = 0.0
    _three_planes(row, n_pieces, numbers, scale)


def _whole_dots(n_rows: int, n_vectors: int, fetched: Literal["nothing", "following", "each"] = "nothing") -> Any:
    """The operation that writes the products of so many rows of 8 bits, which stand `distance` rows apart, and vectors
    of `take_whole`. It fetches nothing, or what follows rows that stand side by side, or what follows in each row."""

    def emit(
        builder: Any,
        values: Any,
        row_bytes: Any,
        distance: Any,
        numbers: Any,
        vector_step: Any,
        scales: Any,
        vector_scales: Any,
        scale_step: Any,
        to: Any,
        to_step: Any,
    ) -> None:
        if not is_wide(8):
            return
        int64 = values.type
        rows = apart(builder, values, builder.mul(row_bytes, distance), n_rows)
        vectors = apart(builder, numbers, vector_step, n_vectors)

        def add_row_parts(offset: Any, at: Any, part: Any, totals: list[Any]) -> list[Any]:
            of_vectors = [
                [
                    load(builder, builder.add(builder.add(v, at), int64(_HEAD + 64 * place)), _BYTES)
                    for place in range(3)
                ]
                for v in vectors
            ]
            totals = list(totals)
            for i, row in enumerate(rows):
                unsigned = builder.xor(part(builder, builder.add(row, offset)), constants(_BYTES, -128))
                for v, planes in enumerate(of_vectors):
                    for place, plane in enumerate(planes):
                        of_both = 3 * (v * n_rows + i) + place
                        totals[of_both] = add_products(builder, totals[of_both], unsigned, plane)
            return totals

        def whole(index: Any, totals: list[Any]) -> list[Any]:
            offset = builder.shl(index, int64(6))
            if fetched == "following":
                fetch_ahead(builder, builder.add(values, builder.mul(offset, int64(n_rows))), 64 * n_rows)
            elif fetched == "each":
                for row in rows:
                    prefetch(builder, builder.add(builder.add(row, offset), int64(_AHEAD_IN_ROW)))
            at = builder.mul(index, int64(192))
            return add_row_parts(offset, at, lambda b, address: load(b, address, _BYTES), totals)

        begin = [
            load(builder, builder.add(v, int64(64 * place)), _SUMS)
            for v in vectors
            for _ in range(n_rows)
            for place in range(3)
        ]
        wholes = builder.lshr(row_bytes, int64(6))
        totals = looped(builder, wholes, begin, whole)
        left = builder.and_(builder.lshr(row_bytes, int64(5)), int64(1))
        offset, at = builder.shl(wholes, int64(6)), builder.mul(wholes, int64(192))
        totals = looped(builder, left, totals, lambda _, totals: add_row_parts(offset, at, _half, totals))
        multiply, weights = fused(builder, _FLOATS), [constants(_FLOATS, 256.0**place) for place in range(3)]
        are_side_by_side = fetched == "following"
        if are_side_by_side:
            of_rows = _widened(builder, scales, n_rows)
        else:
            of_rows = ir.Constant(ir.VectorType(_F32, n_rows), ir.Undefined)
            for i, each in enumerate(apart(builder, scales, builder.shl(distance, int64(1)), n_rows)):
                of_row = builder.extract_element(_widened(builder, each, 1), _I32(0))
                of_rows = builder.insert_element(of_rows, of_row, _I32(i))
        for v, address in enumerate(apart(builder, to, to_step, n_vectors)):
            sums = list[Any]()
            for i in range(n_rows):
                low, middle, high = (builder.sitofp(total, _FLOATS) for total in totals[3 * (v * n_rows + i) :][:3])
                total = builder.call(multiply, [middle, weights[1], low])
                sums.append(folded(builder, builder.call(multiply, [high, weights[2], total])))
            result = row_sums(builder, sums)
            scale = load(builder, builder.add(vector_scales, builder.mul(scale_step, int64(v))), _F32)
            factors = builder.fmul(of_rows, spread(builder, scale, n_rows))
            if n_rows == 1:
                store(builder, address, builder.fmul(result, builder.extract_element(factors, _I32(0))))
            elif are_side_by_side:
                store(builder, address, builder.fmul(result, factors))
            else:
                store_apart(builder, address, builder.shl(distance, int64(2)), builder.fmul(result, factors))

    return operation("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")(emit)


_whole_by_two, _whole_by_one = (_whole_dots(ROWS, n_vectors, "following") for n_vectors in (2, 1))
_apart_by_one, _wide_apart_by_one = _whole_dots(ROWS, 1), _whole_dots(ROWS, 1, "each")
_whole_row = _whole_dots(1, 1)


@jitted_with(fastmath=AS_WRITTEN)
def multiply_whole(
    numbers, vector_scales, values, scales, y, start, stop, n_vectors, n_pieces, y_row
):  # fmt: skip
    """y[v, i] = the product of vector v, made by `take_whole`, and the row i of 8-bit integers, for the rows start to
    stop; y is float32 with y_row numbers per vector, scales are in bf16, and those of the vectors n_pieces float32
    apart.

    Weights of one vector come from memory, at the rate of a plain sum if each of the four rows is in a quarter of its
    own: a processor foresees four places that it reads on and on, but not four short rows side by side, for which
    fetching is slower than what it does by itself.
    """
    row_bytes, step, scale_step, to_step = PIECE * n_pieces, vector_bytes(n_pieces), 4 * n_pieces, 4 * y_row
    i, quarter = start, (stop - start) // ROWS
    if n_vectors == 1:
        stays = 3 * row_bytes <= _STAYS
        for i in range(start, start + quarter):
            at, of_rows, to = values + i * row_bytes, scales + 2 * i, y + 4 * i
            if stays:
                _apart_by_one(at, row_bytes, quarter, numbers, 0, of_rows, vector_scales, 0, to, 0)
            else:
                _wide_apart_by_one(at, row_bytes, quarter, numbers, 0, of_rows, vector_scales, 0, to, 0)
        i = start + ROWS * quarter
    while i < stop:
        n_rows = ROWS if i + ROWS <= stop else 1
        at, of_rows = values + i * row_bytes, scales + 2 * i
        v = 0
        while v < n_vectors:
            x, of_x, to = numbers + step * v, vector_scales + scale_step * v, y + 4 * (v * y_row + i)
            if n_rows == 1:
                _whole_row(at, row_bytes, 1, x, step, of_rows, of_x, scale_step, to, to_step)
                v += 1
            elif v + 2 <= n_vectors:
                _whole_by_two(at, row_bytes, 1, x, step, of_rows, of_x, scale_step, to, to_step)
                v += 2
            else:
                _whole_by_one(at, row_bytes, 1, x, step, of_rows, of_x, scale_step, to, to_step)
                v += 1
        i += n_rows


@operation("void(int64, int64, int64)")
def _spread_four(builder: Any, scales: Any, n: Any, to: Any) -> None:
    """Write each of four float32 four times; those from n on count as 0."""
    four = ir.VectorType(_F32, 4)
    left = spread(builder, builder.trunc(n, _I32), 4)
    inside = builder.icmp_signed(">", left, constants(left.type, list(range(4))))
    read = builder.select(inside, load(builder, scales, four), constants(four, 0.0))
    places = [place for place in range(4) for _ in range(4)]
    store(builder, to, builder.shuffle_vector(read, read, constants(_SUMS, places)))


@jitted_with(fastmath=FASTMATH)
def spread_pieces(n_pieces, pieces_per_group, numbers, scales, sums):
    """The scales of a vector's pieces once for each place of a register, behind its integers, and in `sums` those of
    groups in place of those of pieces."""
    to = numbers + 64 * ((n_pieces + 3) // 4 * 4)
    for p in range(0, n_pieces, 4):
        _spread_four(scales + 4 * p, n_pieces - p, to + 16 * p)
    of_pieces = f32_at(sums)
    for g in range(n_pieces // pieces_per_group):
        total = of_pieces[g * pieces_per_group]
        for p in range(g * pieces_per_group + 1, (g + 1) * pieces_per_group):
            total += of_pieces[p]
        of_pieces[g] = total


def _grouped_dots(n_rows: int, n_vectors: int) -> Any:
    """The operation that writes the products of so many rows of 4 bits in groups and vectors of `spread_pieces`.

    A group has 2^`shift` pieces, and two at least. The even numbers of a piece are in the lower halves of its bytes,
    and the odd ones in the upper.
    """

    def emit(
        builder: Any,
        values: Any,
        row_bytes: Any,
        numbers: Any,
        vector_step: Any,
        scales: Any,
        middles: Any,
        n_groups: Any,
        shift: Any,
        sums: Any,
        sums_step: Any,
        to: Any,
        to_step: Any,
    ) -> None:
        if not is_wide(4):
            return
        int64 = values.type
        rows, group_bytes = apart(builder, values, row_bytes, n_rows), builder.shl(n_groups, int64(1))
        scale_rows, middle_rows = (apart(builder, first, group_bytes, n_rows) for first in (scales, middles))
        vectors = apart(builder, numbers, vector_step, n_vectors)
        n_pieces = builder.lshr(row_bytes, int64(4))
        # Behind integers of whole fours of pieces.
        spread_at = builder.shl(builder.and_(builder.add(n_pieces, int64(3)), int64(-4)), int64(6))
        fifteen, multiply = constants(_BYTES, 15), fused(builder, _FLOATS)
        halves = constants(_SUMS, list(range(16)))

        def eight(address: Any) -> Any:
            """A number in bf16 as float32 eight times."""
            words = spread(builder, load(builder, address, _I16), 16)
            bits = builder.and_(
                builder.bitcast(words, ir.VectorType(_I32, 8)), constants(ir.VectorType(_I32, 8), -(2**16))
            )
            return builder.bitcast(bits, F32X8)

        def add_row_parts(step: Any, is_whole: bool, totals: list[Any]) -> list[Any]:
            offset, at = builder.shl(step, int64(6)), builder.shl(step, int64(8))
            if is_whole:
                fetch_ahead(builder, builder.add(values, builder.mul(offset, int64(n_rows))), 64 * n_rows)
            of_vectors = [
                [load(builder, builder.add(builder.add(v, at), int64(64 * place)), _BYTES) for place in range(4)]
                for v in vectors
            ]
            spread_scales = [load(builder, builder.add(builder.add(v, spread_at), offset), _FLOATS) for v in vectors]
            piece = builder.shl(step, int64(2))
            groups = [
                builder.shl(builder.lshr(each, shift), int64(1)) for each in (piece, builder.add(piece, int64(2)))
            ]
            totals = list(totals)
            for i, row in enumerate(rows):
                address = builder.add(row, offset)
                both = load(builder, address, _BYTES) if is_whole else _half(builder, address)
                low = builder.and_(both, fifteen)
                # A shift of words is an instruction of x86, one of bytes is not.
                words = builder.bitcast(both, ir.VectorType(_I16, 32))
                high = builder.and_(builder.bitcast(builder.lshr(words, constants(words.type, 4)), _BYTES), fifteen)
                first = eight(builder.add(scale_rows[i], groups[0]))
                second = eight(builder.add(scale_rows[i], groups[1])) if is_whole else constants(F32X8, 0.0)
                of_row = builder.shuffle_vector(first, second, halves)
                for v, planes in enumerate(of_vectors):
                    dot = builder.sitofp(nibble_dots(builder, low, high, planes), _FLOATS)
                    of_both = v * n_rows + i
                    scaled = builder.fmul(dot, spread_scales[v])
                    totals[of_both] = builder.call(multiply, [scaled, of_row, totals[of_both]])
            return totals

        wholes = builder.lshr(row_bytes, int64(6))
        totals = looped(
            builder,
            wholes,
            [constants(_FLOATS, 0.0)] * (n_rows * n_vectors),
            lambda step, totals: add_row_parts(step, True, totals),
        )
        left = builder.and_(builder.lshr(row_bytes, int64(5)), int64(1))
        totals = looped(builder, left, totals, lambda _, totals: add_row_parts(wholes, False, totals))
        totals = [folded(builder, total) for total in totals]

        def add_offsets(chunk: Any, totals: list[Any]) -> list[Any]:
            # The last eight groups overlap those before them, whose sums count as 0.
            first, last = builder.shl(chunk, int64(3)), builder.sub(n_groups, int64(8))
            group = builder.select(builder.icmp_signed("<", first, last), first, last)
            again = spread(builder, builder.trunc(builder.sub(first, group), _I32), 8)
            new = builder.icmp_signed(">=", constants(again.type, list(range(8))), again)
            of_vectors = [
                builder.select(new, load(builder, plus(builder, each, group, 4), F32X8), constants(F32X8, 0.0))
                for each in apart(builder, sums, sums_step, n_vectors)
            ]
            totals, multiply_eight = list(totals), fused(builder, F32X8)
            for i in range(n_rows):
                scale, middle = (
                    _widened(builder, plus(builder, each[i], group, 2), 8) for each in (scale_rows, middle_rows)
                )
                offset = builder.call(multiply_eight, [scale, constants(F32X8, -8.0), middle])
                for v, of_vector in enumerate(of_vectors):
                    of_both = v * n_rows + i
                    totals[of_both] = builder.call(multiply_eight, [offset, of_vector, totals[of_both]])
            return totals

        chunks = builder.lshr(builder.add(n_groups, int64(7)), int64(3))
        totals = looped(builder, chunks, totals, add_offsets)
        for v, address in enumerate(apart(builder, to, to_step, n_vectors)):
            store(builder, address, row_sums(builder, totals[v * n_rows :][:n_rows]))

    return operation("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")(emit)


_grouped_by_two, _grouped_by_one, _grouped_row = (_grouped_dots(*sizes) for sizes in ((ROWS, 2), (ROWS, 1), (1, 1)))


@jitted_with(fastmath=AS_WRITTEN)
def multiply_grouped(
    numbers, vector_sums, values, scales, middles, y, start, stop, n_vectors, n_pieces, n_groups, y_row
):  # fmt: skip
    """y[v, i] = the product of vector v, made by `spread_pieces`, and the row i of 4-bit integers, for the rows start
    to stop; y is float32 with y_row numbers per vector, sums are n_pieces float32 apart, and scales and middles in
    bf16. There are at least eight groups, of a power of two of pieces, from two on."""
    row_bytes, step, sums_step, to_step = PIECE // 2 * n_pieces, vector_bytes(n_pieces), 4 * n_pieces, 4 * y_row
    shift, per_group = 0, n_pieces // n_groups
    while 1 << shift < per_group:
        shift += 1
    ahead = AHEAD // row_bytes // ROWS * ROWS + ROWS
    i = start
    while i < stop:
        n_rows = ROWS if i + ROWS <= stop else 1
        at, of_rows, offsets = values + i * row_bytes, scales + 2 * i * n_groups, middles + 2 * i * n_groups
        fetch(of_rows + 2 * ahead * n_groups, 2 * n_rows * n_groups)
        fetch(offsets + 2 * ahead * n_groups, 2 * n_rows * n_groups)
        v = 0
        while v < n_vectors:
            x, of_x, to = numbers + step * v, vector_sums + sums_step * v, y + 4 * (v * y_row + i)
            if n_rows == 1:
                _grouped_row(
                    at, row_bytes, x, step, of_rows, offsets, n_groups, shift, of_x, sums_step, to, to_step
                )  # fmt: skip
                v += 1
            elif v + 2 <= n_vectors:
                _grouped_by_two(
                    at, row_bytes, x, step, of_rows, offsets, n_groups, shift, of_x, sums_step, to, to_step
                )  # fmt: skip
                v += 2
            else:
                _grouped_by_one(
                    at, row_bytes, x, step, of_rows, offsets, n_groups, shift, of_x, sums_step, to, to_step
                )  # fmt: skip
                v += 1
        i += n_rows
