"""Products of a few vectors with the rows of a matrix in bf16 or float32, which is read once, compiled for a CPU.

Memory sets the speed. One vector is multiplied by four rows at a time, one from each quarter of those that are asked
for: four streams, each in the order of memory, are sooner there than one, and than four rows that stand side by side,
above all where pages are small. More vectors are multiplied by four rows side by side, as others are fetched ahead. Up
to four vectors wait for memory (three, if numbers are widened): each is multiplied by four rows, which are in the first
cache then, and fetches the lines ahead again, some of which a waiting processor has dropped. More vectors wait for
products, and four of them are multiplied by a piece of the rows while it is in registers. Of eight or more, wide rows
are multiplied part by part, sixteen rows at a time, so that the vectors' parts stay in the first cache; sums wait in
memory. What a vector's product is does not depend on how many more there are. In bf16 a processor with AVX512-BF16
multiplies and adds pairs in one instruction; others widen numbers to float32 in registers. Sums are in float32.
"""

from typing import Any

from llvmlite import ir

from napkin.kernels.numba_numbers import AS_WRITTEN, FASTMATH
from napkin.kernels.products.numba_dots import (
    apart,
    constants,
    folded,
    fused,
    looped,
    prefetch,
    row_sums,
    store_apart,
)
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with, processor_features
from napkin.machine_code.pointers import called, load, operation, store

STEP = 32
"""The number of columns must be a multiple of this."""
_ROWS, _VECTORS = 4, 4
_AHEAD, _AHEAD_OF_FOUR = 1024, 24576
"""Bytes ahead of those that are multiplied that rows are fetched, in streams and four side by side: more of them where
memory waits for products, and the processor does not foresee what is read."""
_TILE = 4
"""Fours of rows that are multiplied while as many are fetched."""
_COLUMNS = 1024
"""Columns of a part of wide rows: as many numbers of eight vectors stay in the first cache from row to row."""
_GROUPS = 2
"""Fours of vectors that a part of the rows is multiplied by before the next part is read."""
_OF_GROUP = _ROWS * _VECTORS * 64
"""Bytes of the sums of four rows and four vectors."""

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def _has_pairs() -> bool:
    """True if the processor multiplies pairs of bf16 and adds them to float32."""
    return {"avx512bf16", "avx512f"} <= processor_features()


@operation("int64()")
def _widens_bf16(builder: Any) -> Any:
    """1 if numbers in bf16 are widened before they are multiplied, which takes longer than to read them; else 0."""
    return ir.IntType(64)(int(not _has_pairs()))


def _dots(
    is_bf16: bool, n_rows: int, n_vectors: int, *, begins: bool = True, ends: bool = True, in_streams: bool = False
) -> Any:
    """The operation that writes the products of so many vectors, which have the matrix's format, with so many rows.

    Row i and vector v begin `row_bytes` and `vector_bytes` after the one before; v's products are written `y_bytes`
    after those of the one before, and a row's `distance` float32 after those of the row before. As many lines as are
    read are fetched from `ahead` on, or of rows `in_streams` each one's own. Where rows are multiplied part by part,
    sums that a part does not begin or end are `held`.
    """
    size = 2 if is_bf16 else 4

    def emit(
        builder: Any,
        weights: Any,
        row_bytes: Any,
        vectors: Any,
        vector_bytes: Any,
        n_columns: Any,
        y: Any,
        y_bytes: Any,
        distance: Any,
        ahead: Any,
        held: Any,
    ) -> None:
        int64, multiplies_pairs = weights.type, is_bf16 and _has_pairs()
        n_lanes = 16 if "avx512f" in processor_features() else 8
        sums = ir.VectorType(_F32, n_lanes)
        multiply = fused(builder, sums)
        rows = apart(builder, weights, row_bytes, n_rows)
        columns = apart(builder, vectors, vector_bytes, n_vectors)

        def numbers(address: Any) -> list[Any]:
            """The next 32 numbers as what is multiplied."""
            if multiplies_pairs:
                return [load(builder, address, ir.VectorType(_I32, 16))]
            parts = [builder.add(address, int64(size * first)) for first in range(0, STEP, n_lanes)]
            if not is_bf16:
                return [load(builder, part, sums) for part in parts]
            words = ir.VectorType(_I32, n_lanes)
            wide = [builder.zext(load(builder, part, ir.VectorType(_I16, n_lanes)), words) for part in parts]
            return [builder.bitcast(builder.shl(each, constants(words, 16)), sums) for each in wide]

        def added(total: Any, left: Any, right: Any) -> Any:
            if multiplies_pairs:
                return called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", sums, (total, left, right))
            return builder.call(multiply, [left, right, total])

        def step(index: Any, totals: list[Any]) -> list[Any]:
            offset = builder.mul(index, int64(size * STEP))
            of_rows = [numbers(builder.add(row, offset)) for row in rows]
            totals = list(totals)
            if in_streams:
                places = [builder.add(row, builder.add(offset, int64(_AHEAD))) for row in rows]
            else:
                # Line by line, in their order in memory.
                first = builder.add(ahead, builder.mul(offset, int64(n_rows)))
                places = apart(builder, first, int64(size * STEP), n_rows)
            for place in places:
                for line in range(0, size * STEP, 64):
                    prefetch(builder, builder.add(place, int64(line)))
            for v, vector in enumerate(columns):
                right = numbers(builder.add(vector, offset))
                for i, left in enumerate(of_rows):
                    place = v * n_rows + i
                    for one, other in zip(left, right, strict=True):
                        totals[place] = added(totals[place], one, other)
            return totals

        places = apart(builder, held, int64(4 * n_lanes), n_rows * n_vectors)
        zeros = [constants(sums, 0.0) if begins else load(builder, place, sums) for place in places]
        totals = looped(builder, builder.udiv(n_columns, int64(STEP)), zeros, step)
        if not ends:
            for place, total in zip(places, totals, strict=True):
                store(builder, place, total)
            return
        totals = [folded(builder, total) for total in totals]
        for v, to in enumerate(apart(builder, y, y_bytes, n_vectors)):
            result = row_sums(builder, totals[v * n_rows : (v + 1) * n_rows])
            if in_streams:
                store_apart(builder, to, builder.mul(distance, int64(4)), result)
            else:
                store(builder, to, result)

    return operation("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")(emit)


@operation("int64()")
def _held_sums(builder: Any) -> Any:
    """The address of room for the sums of a tile of rows with a few groups of vectors, on the stack."""
    from numba.core import cgutils

    room = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), _TILE * _GROUPS * _OF_GROUP))
    room.align = 64
    return builder.ptrtoint(room, ir.IntType(64))


def _products(is_bf16: bool) -> Any:
    size = 2 if is_bf16 else 4
    four_by_four, four_by_one, one_by_one = (_dots(is_bf16, *each) for each in ((_ROWS, _VECTORS), (_ROWS, 1), (1, 1)))
    in_streams = _dots(is_bf16, _ROWS, 1, in_streams=True)
    first_part, middle_part, last_part = (
        _dots(is_bf16, _ROWS, _VECTORS, begins=begins, ends=ends)
        for begins, ends in ((True, False), (False, False), (False, True))
    )

    @jitted_with(fastmath=AS_WRITTEN)
    def multiply_wide(vectors, weight, y, i, n_vectors, n_columns, y_row):
        """The products of a tile of rows from i on, part by part, with vectors in whole fours."""
        row_bytes, y_bytes, held = size * n_columns, 4 * y_row, _held_sums()
        for v in range(0, n_vectors, _GROUPS * _VECTORS):
            for first in range(0, n_columns, _COLUMNS):
                n = min(n_columns - first, _COLUMNS)
                for r in range(_TILE):
                    at = weight + (i + r * _ROWS) * row_bytes + size * first
                    # As many lines of the next tile, in their order.
                    ahead = weight + (i + _TILE * _ROWS) * row_bytes + size * _ROWS * (_TILE * first + r * n)
                    for w in range(v, min(v + _GROUPS * _VECTORS, n_vectors), _VECTORS):
                        x, to = vectors + w * row_bytes + size * first, y + w * y_bytes + 4 * (i + r * _ROWS)
                        kept = held + (r * _GROUPS + (w - v) // _VECTORS) * _OF_GROUP
                        if first == 0:
                            first_part(at, row_bytes, x, row_bytes, n, to, y_bytes, 1, ahead, kept)
                        elif first + n < n_columns:
                            middle_part(at, row_bytes, x, row_bytes, n, to, y_bytes, 1, ahead, kept)
                        else:
                            last_part(at, row_bytes, x, row_bytes, n, to, y_bytes, 1, ahead, kept)

    @jitted_with(fastmath=AS_WRITTEN)
    def multiply(vectors, weight, y, start, stop, n_vectors, n_columns, y_row):
        """y[v, i] = the product of vector v and the row i, for the rows start to stop; y is float32 with y_row numbers
        per vector."""
        row_bytes, y_bytes = size * n_columns, 4 * y_row
        is_wide = n_columns > _COLUMNS and n_vectors >= _GROUPS * _VECTORS
        fewest_together = _VECTORS if is_bf16 and _widens_bf16() else _VECTORS + 1
        i = start
        if n_vectors == 1:
            quarter = (stop - start) // _ROWS
            for i in range(start, start + quarter):
                at = weight + i * row_bytes
                in_streams(at, quarter * row_bytes, vectors, row_bytes, n_columns, y + 4 * i, y_bytes, quarter, 0, 0)
            i = start + _ROWS * quarter
        while i < stop:
            n_rows = _ROWS if n_vectors > 1 and i + _ROWS <= stop else 1
            at = weight + i * row_bytes
            v = 0
            if is_wide and i + _TILE * _ROWS <= stop:
                n_rows, v = _TILE * _ROWS, n_vectors - n_vectors % _VECTORS
                multiply_wide(vectors, weight, y, i, v, n_columns, y_row)
            while v < n_vectors:
                x, to = vectors + v * row_bytes, y + v * y_bytes + 4 * i
                if n_rows == 1:
                    one_by_one(at, row_bytes, x, row_bytes, n_columns, to, y_bytes, 1, at + _AHEAD, 0)
                    v += 1
                elif n_vectors >= fewest_together and v + _VECTORS <= n_vectors:
                    four_by_four(at, row_bytes, x, row_bytes, n_columns, to, y_bytes, 1, at + _AHEAD_OF_FOUR, 0)
                    v += _VECTORS
                else:
                    for r in range(0, n_rows, _ROWS):
                        rows, these = at + r * row_bytes, to + 4 * r
                        ahead = rows + _AHEAD_OF_FOUR
                        four_by_one(rows, row_bytes, x, row_bytes, n_columns, these, y_bytes, 1, ahead, 0)
                    v += 1
            i += n_rows

    return multiply


multiply_bf16, multiply_float32 = _products(True), _products(False)


@CompiledFunction.with_options(fastmath=FASTMATH)
def multiply_dense(vectors, is_bf16, weight, y, start, stop, n_vectors, n_columns, y_row, buffer):
    """The products of vectors [n_vectors, n_columns] and the rows start to stop of a matrix, both in bf16 or float32,
    as float32 [n_vectors, y_row]. Columns are a multiple of 32."""
    if is_bf16:
        multiply_bf16(vectors, weight, y, start, stop, n_vectors, n_columns, y_row)
    else:
        multiply_float32(vectors, weight, y, start, stop, n_vectors, n_columns, y_row)
