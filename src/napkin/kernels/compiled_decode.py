"""Compiled loops for one new token on a CPU: a bf16 matrix times a vector, and attention of one query per sequence.

One token reads every weight and every key once, so memory sets the speed. torch's bf16 products of one row read at half
that speed, and its fused attention of one query at a tenth. Numbers are widened to fp32 in registers and summed in
fp32. Compiled when imported, in a second or two; arguments are addresses, which nothing checks.
"""

from inspect import unwrap
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Sums in any order, so that they run in vectors; NaN and infinity keep their meaning.
_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
array = numba.carray  # pyright: ignore[reportPrivateImportUsage]
_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)


def compiled(signature: str | None = None) -> Any:
    """Compile for the signature when defined; without one, into its callers."""

    def decorate(function: Any) -> Any:
        # A runtime type checker may have wrapped it.
        return (numba.njit(signature, **_OPTIONS) if signature else numba.njit(inline="always", **_OPTIONS))(
            unwrap(function)
        )

    return decorate


def _converter(target: Any, source: Any, emit: Any) -> Any:
    def convert(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(context, builder, arguments[0])

        return target(source), generate

    return intrinsic(convert)


def _pointer(kind: Any) -> Any:
    target = types.CPointer(kind)
    return _converter(
        target, types.int64, lambda context, builder, x: builder.inttoptr(x, context.get_value_type(target))
    )


u16_at, f32_at, i64_at, i8_at = map(_pointer, (types.uint16, types.float32, types.int64, types.int8))
"""The pointer of an address."""
widened = _converter(
    types.float32,
    types.uint16,
    lambda context, builder, x: builder.bitcast(
        builder.shl(builder.zext(x, ir.IntType(32)), ir.Constant(ir.IntType(32), 16)), ir.FloatType()
    ),
)
"""The float32 of a bf16's bits."""
_float_of_bits = _converter(types.float32, types.int32, lambda context, builder, x: builder.bitcast(x, ir.FloatType()))


@compiled()
def _exponential(x: Any) -> Any:
    """e^x for x up to 0, within 2 units in the last place; math.exp would be a call per number."""
    x = max(x, np.float32(-87.0))
    whole = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - whole * _LN_2
    # Taylor's series to r^6, |r| up to ln(2)/2: the first term left out is below 2^-22 of the sum.
    p = np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * _float_of_bits(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@compiled()
def capped(score: Any, cap: Any) -> Any:
    """cap · tanh(score / cap), with e^x of what is not above 0 alone; the score itself if cap is 0."""
    if cap > 0:
        small = _exponential(-abs(score) * np.float32(2) / cap)
        bounded = cap * (np.float32(1) - small) / (np.float32(1) + small)
        return bounded if score > 0 else -bounded
    return score


@compiled()
def exponentials(scores: Any, row: Any, n: Any, largest: Any) -> Any:
    """Make the first n scores of a row e^(score - largest); their sum."""
    total = np.float32(0)
    for t in range(n):
        e = _exponential(scores[row, t] - largest)
        scores[row, t] = e
        total += e
    return total


@compiled("void(int64, int64, int64, int64, int64)")
def matrix_vector(weight: Any, x: Any, y: Any, n_rows: Any, n_columns: Any) -> None:
    """y = weight · x; weight is bf16 [n_rows, n_columns], x and y are float32."""
    matrix = array(u16_at(weight), (n_rows, n_columns))
    vector, result = array(f32_at(x), (n_columns,)), array(f32_at(y), (n_rows,))
    for i in range(n_rows):
        total = np.float32(0)
        for j in range(n_columns):
            total += widened(matrix[i, j]) * vector[j]
        result[i] = total


@compiled("void(" + ", ".join(["int64"] * 15) + ", float32, float32)")
def attend(
    queries: Any,
    keys: Any,
    values: Any,
    mixed: Any,
    counts: Any,
    table: Any,
    n_sequences: Any,
    n_kv_heads: Any,
    group: Any,
    width: Any,
    n_blocks: Any,
    block_size: Any,
    block_stride: Any,
    head_stride: Any,
    longest: Any,
    scale: Any,
    cap: Any,
) -> None:
    """Each query's softmax over the first counts[b] slots of its sequence, whose blocks table[b] numbers.

    queries and mixed are float32 [n_sequences, n_kv_heads · group, width]; keys and values are bf16 with those strides
    between blocks and heads, in numbers. counts and table are int64; scores are capped unless cap is 0.
    """
    n_heads = n_kv_heads * group
    query = array(f32_at(queries), (n_sequences, n_heads, width))
    result = array(f32_at(mixed), (n_sequences, n_heads, width))
    seen, blocks = array(i64_at(counts), (n_sequences,)), array(i64_at(table), (n_sequences, n_blocks))
    scores = np.empty((group, longest), np.float32)
    largest, total = np.empty(group, np.float32), np.empty(group, np.float32)
    for b in range(n_sequences):
        n_seen = seen[b]
        for h in range(n_kv_heads):
            largest[:] = np.float32(-3e38)
            total[:] = np.float32(0)
            for first in range(0, n_seen, block_size):
                place = 2 * (blocks[b, first // block_size] * block_stride + h * head_stride)
                key = array(u16_at(keys + place), (block_size, width))
                for t in range(min(block_size, n_seen - first)):
                    for g in range(group):
                        score = np.float32(0)
                        for c in range(width):
                            score += widened(key[t, c]) * query[b, h * group + g, c]
                        score = capped(score * scale, cap)
                        scores[g, first + t] = score
                        largest[g] = max(largest[g], score)
            for g in range(group):
                total[g] = np.float32(1) / exponentials(scores, g, n_seen, largest[g])
                for c in range(width):
                    result[b, h * group + g, c] = np.float32(0)
            for first in range(0, n_seen, block_size):
                place = 2 * (blocks[b, first // block_size] * block_stride + h * head_stride)
                value = array(u16_at(values + place), (block_size, width))
                for t in range(min(block_size, n_seen - first)):
                    for g in range(group):
                        weight = scores[g, first + t] * total[g]
                        for c in range(width):
                            result[b, h * group + g, c] += weight * widened(value[t, c])
