"""Attention of one head in a thread's cache, in bf16, compiled: no score leaves the cache, and keys that no query of a
block sees are not multiplied.

A processor with AVX512-BF16 multiplies and adds pairs of bf16 in one instruction; others widen them. Matrices are
multiplied in tiles of 8 × 32 sums in registers. The right matrix is packed: for each 32 columns, one number of 32 bits
per pair of rows and column. Scores and all sums are float32; weights and the scores' gradients are rounded to bf16 for
the products that read them.
"""

from math import log
from typing import Any

import numpy as np
from llvmlite import ir

from napkin.kernels.attention.numba_rows import bound_scores
from napkin.kernels.attention.numba_softmax import exponentiate_scores, narrow_pair, narrow_scaled, weigh_again
from napkin.kernels.numba_numbers import FASTMATH, float_argument, narrowed
from napkin.kernels.products.numba_dots import constants, fused, looped, spread
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with, processor_features
from napkin.machine_code.pointers import called, f32_at, i64_at, load, operation, u16_at, u32_at

BLOCK = 32
"""Queries of a block, and columns of a tile."""
_ROWS = 8
_I32, _F32 = ir.IntType(32), ir.FloatType()
_LANES = 16


def _tile(*, adds: bool) -> Any:
    """The operation that writes 8 rows of 32 sums of products of pairs, or adds them to what stands there.

    The left matrix has `n_steps` pairs per row, a_row and a_step bytes apart by row and pair; the right one has 32
    pairs per step, b_step bytes apart. Rows of sums are c_row bytes apart.
    """

    def added(builder: Any, total: Any, left: Any, right: Any) -> Any:
        if {"avx512bf16", "avx512f"} <= processor_features():
            return called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, (total, left, right))
        for half in (
            lambda each: builder.shl(each, constants(each.type, 16)),
            lambda each: builder.and_(each, constants(each.type, -65536)),
        ):
            wide = (builder.bitcast(half(each), total.type) for each in (left, right))
            total = builder.call(fused(builder, total.type), [*wide, total])
        return total

    def emit(
        builder: Any, a: Any, a_row: Any, a_step: Any, b: Any, b_step: Any, n_steps: Any, c: Any, c_row: Any
    ) -> None:
        int64, sums, pairs = a.type, ir.VectorType(_F32, _LANES), ir.VectorType(_I32, _LANES)
        rows = [builder.add(a, builder.mul(a_row, int64(i))) for i in range(_ROWS)]
        places = [
            builder.add(builder.add(c, builder.mul(c_row, int64(i))), int64(4 * _LANES * half))
            for i in range(_ROWS)
            for half in range(2)
        ]
        first = [load(builder, place, sums) if adds else constants(sums, 0.0) for place in places]

        def step(index: Any, totals: list[Any]) -> list[Any]:
            of_a, of_b = builder.mul(index, a_step), builder.add(b, builder.mul(index, b_step))
            right = [load(builder, builder.add(of_b, int64(4 * _LANES * half)), pairs) for half in range(2)]
            added_totals = []
            for i, row in enumerate(rows):
                left = spread(builder, load(builder, builder.add(row, of_a), _I32), _LANES)
                added_totals += [added(builder, totals[2 * i + half], left, right[half]) for half in range(2)]
            return added_totals

        for place, total in zip(places, looped(builder, n_steps, first, step), strict=True):
            builder.store(total, builder.inttoptr(place, sums.as_pointer())).align = 4

    return operation("void(int64, int64, int64, int64, int64, int64, int64, int64)")(emit)


_write_tile, _add_tile = _tile(adds=False), _tile(adds=True)


@jitted_with(fastmath=FASTMATH)
def multiply(a, a_row, a_step, n_rows, b, b_panel, n_steps, c, c_row, n_columns):
    """c [n_rows, n_columns] = a · b; the panels of 32 columns of b are b_panel bytes apart. Rows are a multiple of 8,
    columns of 32."""
    for column in range(0, n_columns, 32):
        panel = b + column // 32 * b_panel
        for row in range(0, n_rows, 8):
            _write_tile(a + row * a_row, a_row, a_step, panel, 128, n_steps, c + row * c_row + 4 * column, c_row)


@jitted_with(fastmath=FASTMATH)
def add_product(a, a_row, a_step, n_rows, b, b_panel, n_steps, c, c_row, n_columns):
    """c += a · b."""
    for column in range(0, n_columns, 32):
        panel = b + column // 32 * b_panel
        for row in range(0, n_rows, 8):
            _add_tile(a + row * a_row, a_row, a_step, panel, 128, n_steps, c + row * c_row + 4 * column, c_row)


@operation("void(int64, int64, int64, int64)")
def _pack_square(builder: Any, x: Any, row_bytes: Any, n_rows: Any, to: Any) -> None:
    """Write 16 pairs of each of 16 rows as 16 rows of 16 pairs, 128 bytes apart; from row n_rows on they are zero."""
    pairs, int64 = ir.VectorType(_I32, _LANES), x.type
    vectors = []
    for i in range(_LANES):
        is_there = builder.icmp_signed("<", int64(i), n_rows)
        # Beyond the last row nothing is read.
        row = builder.select(is_there, builder.add(x, builder.mul(row_bytes, int64(i))), x)
        vectors.append(builder.select(is_there, load(builder, row, pairs), constants(pairs, 0)))
    # Each round makes the uppermost bit of a number's row the lowest of its column, and that of its column the row's.
    indices = [constants(pairs, [each for j in range(8) for each in (start + j, start + j + 16)]) for start in (0, 8)]
    for _ in range(4):
        vectors = [builder.shuffle_vector(vectors[i], vectors[i + 8], half) for i in range(8) for half in indices]
    for i, row in enumerate(vectors):
        builder.store(row, builder.inttoptr(builder.add(to, int64(128 * i)), pairs.as_pointer())).align = 4


@operation("void(int64, int64, int64, int64)")
def _pair_rows(builder: Any, one: Any, other: Any, n_rows: Any, to: Any) -> None:
    """Write the pairs of 32 numbers of two rows; a row that is not among n_rows is zero."""
    narrow, pairs, int64 = ir.VectorType(ir.IntType(16), _LANES), ir.VectorType(_I32, _LANES), one.type
    for first in range(0, 2 * _LANES, _LANES):
        numbers = []
        for i, row in enumerate((one, other)):
            read = builder.zext(load(builder, builder.add(row, int64(2 * first)), narrow), pairs)
            numbers.append(builder.select(builder.icmp_signed("<", int64(i), n_rows), read, constants(pairs, 0)))
        both = builder.or_(numbers[0], builder.shl(numbers[1], constants(pairs, 16)))
        builder.store(both, builder.inttoptr(builder.add(to, int64(4 * first)), pairs.as_pointer())).align = 4


@jitted_with(fastmath=FASTMATH)
def pack_columns(x, row_bytes, n_rows, n_padded, width, packed):
    """Pack xᵀ [width, n_rows] as a right matrix; columns up to n_padded are zero."""
    n_pairs = width // 2
    for first in range(0, n_padded, 16):
        panel = packed + 128 * (first // 32 * n_pairs) + 64 * (first // 16 % 2)
        left = max(n_rows - first, 0)
        # Where no row is left, none is read.
        row = x + first * row_bytes if left else x
        for pair in range(0, n_pairs, 16):
            _pack_square(row + 4 * pair, row_bytes, left, panel + 128 * pair)


@jitted_with(fastmath=FASTMATH)
def pack_rows(x, row_bytes, n_rows, n_padded, width, packed):
    """Pack x [n_rows, width] as a right matrix; rows up to n_padded are zero."""
    for pair in range(n_padded // 2):
        left = n_rows - 2 * pair
        one = x + 2 * pair * row_bytes if left > 0 else x
        other = one + row_bytes if left > 1 else one
        for column in range(0, width, 32):
            at = packed + 4 * (16 * column * (n_padded // 32) + 32 * pair)
            _pair_rows(one + 2 * column, other + 2 * column, left, at)


@jitted_with(fastmath=FASTMATH)
def copy_rows(x, row_bytes, n_rows, n_padded, width, copied):
    """The rows of x one after the other; rows up to n_padded are zero."""
    to = u32_at(copied)
    for i in range(n_padded):
        row = u32_at(x + i * row_bytes)
        if i < n_rows:
            for j in range(width // 2):
                to[i * (width // 2) + j] = row[j]
        else:
            for j in range(width // 2):
                to[i * (width // 2) + j] = np.uint32(0)


@jitted_with(fastmath=FASTMATH)
def write_rows(x, n_rows, width, to, row_bytes):
    """Round rows of float32, one after the other, to bf16 rows that are row_bytes apart."""
    for i in range(n_rows):
        row, narrow = f32_at(x + 4 * i * width), u16_at(to + i * row_bytes)
        for j in range(width):
            narrow[j] = narrowed(row[j])


@jitted_with(fastmath=FASTMATH)
def seen_keys(first_keys, n, end, n_padded):
    """The first of the keys that a block of n queries sees, the last before `end`, and how many they are; multiples of
    32."""
    first_of = i64_at(first_keys)
    low = n_padded
    for i in range(n):
        low = min(low, first_of[i])
    low = low // 32 * 32
    return low, min((end + 31) // 32 * 32, n_padded) - low


@CompiledFunction.with_options(fastmath=FASTMATH)
def attend_in_tiles(
    query, q_sequence, q_head, q_row, key, k_sequence, k_head, k_row, value, v_sequence, v_head, v_row, first_keys,
    mixed, m_sequence, m_head, m_row, logsumexps, start, stop, n_kv_heads, group, n_queries, n_keys, width, value_width,
    firsts_per_sequence, scale, cap, buffer,
):  # fmt: skip
    """Attention of the keys' heads start to stop, counted over all sequences, and of their groups of queries.

    Strides are the bytes from one sequence, head and position to the next. The first key that each query sees is at
    first_keys, int64; the last query stands at the last key. Widths are multiples of 32. The size of the buffer is told
    in by_tiles.py.
    """
    n_padded = (n_keys + 31) // 32 * 32
    packed_keys = buffer
    packed_values = packed_keys + 2 * n_padded * width
    rows = packed_values + 2 * n_padded * value_width
    scores = rows + 2 * 32 * width
    weights = scores + 4 * 8 * n_padded
    results = weights + 2 * 32 * n_padded
    slope = f32_at(results + 4 * 32 * value_width)
    first_of, logsumexp_of = i64_at(first_keys), f32_at(logsumexps)
    offset = n_keys - n_queries
    scaled, capped = float_argument(scale), float_argument(cap)
    for unit in range(start, stop):
        sequence, kv_head = unit // n_kv_heads, unit % n_kv_heads
        pack_columns(key + sequence * k_sequence + kv_head * k_head, k_row, n_keys, n_padded, width, packed_keys)
        pack_rows(value + sequence * v_sequence + kv_head * v_head, v_row, n_keys, n_padded, value_width, packed_values)
        for head in range(kv_head * group, (kv_head + 1) * group):
            q = query + sequence * q_sequence + head * q_head
            m = mixed + sequence * m_sequence + head * m_head
            sums = (sequence * n_kv_heads * group + head) * n_queries
            for begin in range(0, n_queries, 32):
                n = min(32, n_queries - begin)
                n_rows = (n + 7) // 8 * 8
                firsts = sequence * firsts_per_sequence + begin
                low, n_seen = seen_keys(first_keys + 8 * firsts, n, offset + begin + n, n_padded)
                copy_rows(q + begin * q_row, q_row, n, n_rows, width, rows)
                # Rows become weights while they are in the first cache.
                for group_of_rows in range(0, n_rows, 8):
                    multiply(
                        rows + 2 * group_of_rows * width, 2 * width, 4, 8, packed_keys + 2 * low * width, 64 * width,
                        width // 2, scores + 4 * low, 4 * n_padded, n_seen,
                    )  # fmt: skip
                    for i in range(group_of_rows, group_of_rows + 8):
                        at = scores + 4 * (i % 8 * n_padded + low)
                        used, factor = scaled, np.float32(0)
                        if i < n:
                            if capped > 0:
                                bound_scores(f32_at(at), slope, n_seen, scaled, capped)
                                used = np.float32(1)
                            largest, total = exponentiate_scores(
                                at, n_seen, first_of[firsts + i] - low, offset + begin + i + 1 - low, used
                            )
                            logsumexp_of[sums + begin + i] = largest + np.float32(log(total))
                            factor = np.float32(1) / total
                        narrow_scaled(at, n_seen, factor, weights + 2 * (i * n_padded + low))
                multiply(
                    weights + 2 * low, 2 * n_padded, 4, n_rows, packed_values + 64 * low, 64 * n_padded,
                    n_seen // 2, results, 4 * value_width, value_width,
                )  # fmt: skip
                write_rows(results, n, value_width, m + begin * m_row, m_row)


@CompiledFunction.with_options(fastmath=FASTMATH)
def differentiate_in_tiles(
    gradient, g_sequence, g_head, g_row, query, q_sequence, q_head, q_row, key, k_sequence, k_head, k_row, value,
    v_sequence, v_head, v_row, first_keys, logsumexps, grad_query, gq_sequence, gq_head, gq_row, grad_key, gk_sequence,
    gk_head, gk_row, grad_value, gv_sequence, gv_head, gv_row, start, stop, n_kv_heads, group, n_queries, n_keys, width,
    value_width, firsts_per_sequence, scale, cap, buffer,
):  # fmt: skip
    """The gradients of queries, keys and values, likewise: scores are computed again."""
    n_padded = (n_keys + 31) // 32 * 32
    packed_keys = buffer
    packed_values = packed_keys + 2 * n_padded * width
    paired_keys = packed_values + 2 * n_padded * value_width
    key_sums = paired_keys + 2 * n_padded * width
    value_sums = key_sums + 4 * n_padded * width
    scores = value_sums + 4 * n_padded * value_width
    slopes = scores + 4 * 8 * n_padded
    narrow_slopes = slopes + 4 * 8 * n_padded
    paired_weights = narrow_slopes + 2 * 32 * n_padded
    paired_slopes = paired_weights + 2 * 32 * n_padded
    rows = paired_slopes + 2 * 32 * n_padded
    gradients = rows + 2 * 32 * width
    paired_rows = gradients + 2 * 32 * value_width
    paired_gradients = paired_rows + 2 * 32 * width
    results = paired_gradients + 2 * 32 * value_width
    factors = results + 4 * 32 * width
    first_of, logsumexp_of = i64_at(first_keys), f32_at(logsumexps)
    offset = n_keys - n_queries
    scaled, capped = float_argument(scale), float_argument(cap)
    factor = f32_at(factors)
    for j in range(2 * n_padded):
        factor[j] = scaled
    for unit in range(start, stop):
        sequence, kv_head = unit // n_kv_heads, unit % n_kv_heads
        k, v = key + sequence * k_sequence + kv_head * k_head, value + sequence * v_sequence + kv_head * v_head
        pack_columns(k, k_row, n_keys, n_padded, width, packed_keys)
        pack_columns(v, v_row, n_keys, n_padded, value_width, packed_values)
        pack_rows(k, k_row, n_keys, n_padded, width, paired_keys)
        of_key, of_value = f32_at(key_sums), f32_at(value_sums)
        for j in range(n_padded * width):
            of_key[j] = np.float32(0)
        for j in range(n_padded * value_width):
            of_value[j] = np.float32(0)
        for head in range(kv_head * group, (kv_head + 1) * group):
            q, g = query + sequence * q_sequence + head * q_head, gradient + sequence * g_sequence + head * g_head
            gq = grad_query + sequence * gq_sequence + head * gq_head
            sums = (sequence * n_kv_heads * group + head) * n_queries
            for begin in range(0, n_queries, 32):
                n = min(32, n_queries - begin)
                n_rows = (n + 7) // 8 * 8
                firsts = sequence * firsts_per_sequence + begin
                low, n_seen = seen_keys(first_keys + 8 * firsts, n, offset + begin + n, n_padded)
                copy_rows(q + begin * q_row, q_row, n, n_rows, width, rows)
                copy_rows(g + begin * g_row, g_row, n, n_rows, value_width, gradients)
                pack_rows(q + begin * q_row, q_row, n, 32, width, paired_rows)
                pack_rows(g + begin * g_row, g_row, n, 32, value_width, paired_gradients)
                for group_of_rows in range(0, n_rows, 8):
                    multiply(
                        rows + 2 * group_of_rows * width, 2 * width, 4, 8, packed_keys + 2 * low * width, 64 * width,
                        width // 2, scores + 4 * low, 4 * n_padded, n_seen,
                    )  # fmt: skip
                    multiply(
                        gradients + 2 * group_of_rows * value_width, 2 * value_width, 4, 8,
                        packed_values + 2 * low * value_width, 64 * value_width, value_width // 2, slopes + 4 * low,
                        4 * n_padded, n_seen,
                    )  # fmt: skip
                    before = np.float32(0)
                    for i in range(8):
                        at = 4 * (i * n_padded + low)
                        query_of_block = group_of_rows + i
                        first, end, used, logsumexp = 0, 0, scaled, np.float32(0)
                        if query_of_block < n:
                            first = first_of[firsts + query_of_block] - low
                            end = offset + begin + query_of_block + 1 - low
                            logsumexp = logsumexp_of[sums + begin + query_of_block]
                            if capped > 0:
                                factor = f32_at(factors + 4 * (i % 2 * n_padded + low))
                                bound_scores(f32_at(scores + at), factor, n_seen, scaled, capped)
                                for j in range(n_seen):
                                    factor[j] *= scaled
                                used = np.float32(1)
                        along = weigh_again(scores + at, slopes + at, n_seen, first, end, used, logsumexp)
                        if i % 2:
                            row = group_of_rows + i - 1
                            narrow_pair(
                                scores + at - 4 * n_padded, slopes + at - 4 * n_padded, factors + 4 * low, n_seen,
                                4 * n_padded, narrow_slopes + 2 * (row * n_padded + low),
                                paired_weights + 2 * row * n_padded + 4 * low,
                                paired_slopes + 2 * row * n_padded + 4 * low, before, along,
                            )  # fmt: skip
                        before = along
                multiply(
                    narrow_slopes + 2 * low, 2 * n_padded, 4, n_rows, paired_keys + 64 * low, 64 * n_padded,
                    n_seen // 2, results, 4 * width, width,
                )  # fmt: skip
                write_rows(results, n, width, gq + begin * gq_row, gq_row)
                add_product(
                    paired_slopes + 4 * low, 4, 4 * n_padded, n_seen, paired_rows, 64 * 32, n_rows // 2,
                    key_sums + 4 * low * width, 4 * width, width,
                )  # fmt: skip
                add_product(
                    paired_weights + 4 * low, 4, 4 * n_padded, n_seen, paired_gradients, 64 * 32, n_rows // 2,
                    value_sums + 4 * low * value_width, 4 * value_width, value_width,
                )  # fmt: skip
        write_rows(key_sums, n_keys, width, grad_key + sequence * gk_sequence + kv_head * gk_head, gk_row)
        write_rows(value_sums, n_keys, value_width, grad_value + sequence * gv_sequence + kv_head * gv_head, gv_row)
