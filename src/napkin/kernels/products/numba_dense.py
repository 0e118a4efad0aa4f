"""Products of a few vectors with the rows of a matrix in bf16 or float32, which is read once, compiled for a CPU.

Memory sets the speed. One vector is multiplied row by row, as they stand in memory; more, by four rows at a time, so
that up to four vectors are multiplied by a piece of the rows while it is in registers. Up to four vectors wait for
memory, and take rows that stand far apart: a processor foresees four streams, but not four neighbours in a page. More
vectors wait for products, while rows are fetched ahead. What a vector's product is does not depend on how many more
there are. In bf16 a processor with AVX512-BF16 multiplies and adds pairs in one instruction; others widen numbers to
float32 in registers. Sums are in float32.
"""

from typing import Any

from llvmlite import ir
from numba import types

from napkin.kernels.numba_numbers import FASTMATH
from napkin.kernels.products.numba_dots import called, constants, folded, fused, load, looped, prefetch, row_sums
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with, processor_features
from napkin.machine_code.pointers import operation

STEP = 32
"""The number of columns must be a multiple of this."""
_ROWS, _VECTORS = 4, 4
_AHEAD = {1: 4096, _ROWS: 24576}
"""Bytes ahead of those that are multiplied that rows are fetched, by how many are read side by side: more of them where
memory waits for products."""

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


def _dots(is_bf16: bool, n_rows: int, n_vectors: int, *, are_neighbours: bool = True) -> Any:
    """The operation that writes the products of so many vectors, which have the matrix's format, with so many rows.

    Row i and vector v begin `row_bytes` and `vector_bytes` after the one before; v's products are written `y_bytes`
    after those of the one before, side by side for neighbours, and otherwise `y_step` bytes apart.
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
        y_step: Any,
    ) -> None:
        int64, features = weights.type, processor_features()
        n_lanes = 16 if "avx512f" in features else 8
        multiplies_pairs = is_bf16 and {"avx512bf16", "avx512f"} <= features
        sums = ir.VectorType(_F32, n_lanes)
        multiply = fused(builder, sums)

        def starts(first: Any, step: Any, n: int) -> list[Any]:
            return [builder.add(first, builder.mul(step, int64(i))) for i in range(n)]

        rows, columns = starts(weights, row_bytes, n_rows), starts(vectors, vector_bytes, n_vectors)

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
            if are_neighbours:
                # Rows are prefetched line by line, in their order in memory.
                place = builder.add(builder.add(weights, int64(_AHEAD[n_rows])), builder.mul(offset, int64(n_rows)))
                for line in range(0, size * STEP * n_rows, 64):
                    prefetch(builder, builder.add(place, int64(line)))
            for v, vector in enumerate(columns):
                right = numbers(builder.add(vector, offset))
                for i, left in enumerate(of_rows):
                    place = v * n_rows + i
                    for one, other in zip(left, right, strict=True):
                        totals[place] = added(totals[place], one, other)
            return totals

        zeros = [constants(sums, 0.0)] * (n_rows * n_vectors)
        totals = looped(builder, builder.udiv(n_columns, int64(STEP)), zeros, step)
        totals = [folded(builder, total) for total in totals]
        for v, to in enumerate(starts(y, y_bytes, n_vectors)):
            result = row_sums(builder, totals[v * n_rows : (v + 1) * n_rows])
            if are_neighbours:
                builder.store(result, builder.inttoptr(to, result.type.as_pointer())).align = 4
                continue
            for i, at in enumerate(starts(to, y_step, n_rows)):
                number = builder.extract_element(result, _I32(i))
                builder.store(number, builder.inttoptr(at, number.type.as_pointer())).align = 4

    return operation(types.void, *[types.int64] * 8)(emit)


def _products(is_bf16: bool) -> Any:
    size = 2 if is_bf16 else 4
    four_by_four, four_by_one, one_by_one = (_dots(is_bf16, *each) for each in ((_ROWS, _VECTORS), (_ROWS, 1), (1, 1)))
    far_by_four, far_by_one = (_dots(is_bf16, _ROWS, n_vectors, are_neighbours=False) for n_vectors in (_VECTORS, 1))

    @jitted_with(fastmath=FASTMATH)
    def multiply(vectors, weight, y, start, stop, n_vectors, n_columns, y_row):
        """y[v, i] = the product of vector v and the row i, for the rows start to stop; y is float32 with y_row numbers
        per vector."""
        row_bytes, y_bytes = size * n_columns, 4 * y_row
        i = start
        if 1 < n_vectors <= _VECTORS:
            n = (stop - start) // _ROWS
            gap, y_gap = n * row_bytes, 4 * n
            for i in range(start, start + n):
                at, to = weight + i * row_bytes, y + 4 * i
                if n_vectors == _VECTORS:
                    far_by_four(at, gap, vectors, row_bytes, n_columns, to, y_bytes, y_gap)
                else:
                    for v in range(n_vectors):
                        far_by_one(at, gap, vectors + v * row_bytes, row_bytes, n_columns, to + v * y_bytes, 0, y_gap)
            i = start + n * _ROWS
        while i < stop:
            n_rows = _ROWS if n_vectors > 1 and i + _ROWS <= stop else 1
            at = weight + i * row_bytes
            v = 0
            while v < n_vectors:
                x, to = vectors + v * row_bytes, y + v * y_bytes + 4 * i
                if n_rows == 1:
                    one_by_one(at, row_bytes, x, row_bytes, n_columns, to, y_bytes, 4)
                    v += 1
                elif v + _VECTORS <= n_vectors:
                    four_by_four(at, row_bytes, x, row_bytes, n_columns, to, y_bytes, 4)
                    v += _VECTORS
                else:
                    four_by_one(at, row_bytes, x, row_bytes, n_columns, to, y_bytes, 4)
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
