"""All blocks of a model for a new token of some sequences, compiled: pre-norm blocks with RMSNorm, rotated queries and
keys, SwiGLU, and matrices of integers.

Operator by operator, a small model's token is mostly the calls of its operators. Here all threads of a team run through
all layers, each with its share of the rows of every matrix, and wait for each other where one reads what all wrote.
What is short, as a norm, each thread computes for itself.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from napkin.kernels.attention.numba_decode import attend_to_float32
from napkin.kernels.numba_numbers import FASTMATH, float_argument, sigmoid
from napkin.kernels.products.numba_integers import INT8, PIECE, multiply_rows, number_bytes, take_integers
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with
from napkin.machine_code.pointers import f32_at, i64_at, operation

_I32 = ir.IntType(32)


@operation(types.int64, types.int64)
def _asked(builder: Any, address: Any) -> Any:
    """What the C function at an address returns, an int without arguments."""
    function = builder.inttoptr(address, ir.FunctionType(_I32, []).as_pointer())
    return builder.sext(builder.call(function, []), address.type)


@operation(types.void, types.int64)
def _call(builder: Any, address: Any) -> None:
    """Call the C function at an address, which has neither arguments nor a result."""
    builder.call(builder.inttoptr(address, ir.FunctionType(ir.VoidType(), []).as_pointer()), [])


@jitted_with(inline="always")
def _wait(barrier):
    if barrier:
        _call(barrier)


@jitted_with(inline="always")
def _share(n, thread, n_threads):
    """Where a thread's share of n rows begins: at a multiple of four."""
    return n if thread == n_threads else n // 4 * thread // n_threads * 4


@jitted_with(fastmath=FASTMATH)
def _norm_to_integers(x, gain, eps, n_sequences, n, in_planes, row, numbers, scales, sums):
    """The integers of x / sqrt(mean(x²) + eps) · gain, of each sequence; without a norm where gain is 0."""
    n_pieces = (n + PIECE - 1) // PIECE
    normed = f32_at(row)
    for b in range(n_sequences):
        wide = f32_at(x + 4 * b * n)
        if gain:
            gains = f32_at(gain)
            squares = np.float32(0)
            for j in range(n):
                squares += wide[j] * wide[j]
            factor = np.float32(1) / np.float32(np.sqrt(squares / np.float32(n) + eps))
            for j in range(n):
                normed[j] = wide[j] * factor * gains[j]
        else:
            for j in range(n):
                normed[j] = wide[j]
        of_pieces = 4 * n_pieces * b
        take_integers(
            row, n, n_pieces, in_planes, numbers + number_bytes(n_pieces) * b, scales + of_pieces, sums + of_pieces
        )


@jitted_with(fastmath=FASTMATH)
def _multiply(matrix, numbers, scales, sums, y, y_row, start, stop, n_sequences, buffer):
    """The products with the rows start to stop of a matrix, and its biases; `matrix` are the eight numbers that
    describe it: addresses of values, scales, offsets and biases, pieces and groups of a row, the format of its scales,
    and its form."""
    multiply_rows(
        numbers, scales, sums, matrix[0], matrix[1], matrix[2], y, start, stop, n_sequences, matrix[4], matrix[5],
        matrix[6], y_row, matrix[7], buffer,
    )  # fmt: skip
    if matrix[3]:
        biases, result = f32_at(matrix[3]), f32_at(y)
        for b in range(n_sequences):
            for i in range(start, stop):
                result[b * y_row + i] += biases[i]


@jitted_with(fastmath=FASTMATH)
def _rotate(vector, cosines, signed_sines, width, to):
    """to = the vector with the numbers of both halves rotated as pairs."""
    half = width // 2
    for j in range(half):
        to[j] = vector[j] * cosines[j] + vector[j + half] * signed_sines[j]
        to[j + half] = vector[j + half] * cosines[j + half] + vector[j] * signed_sines[j + half]


@jitted_with(fastmath=FASTMATH)
def _attend(
    qkv, mixed, keys, values, rotation, counts, table, b, h, n_heads, n_kv_heads, width, n_blocks, block_size,
    block_stride, head_stride, longest, scale, rotation_row, buffer,
):  # fmt: skip
    """Attention of the queries that read key head h of sequence b, whose new key and value it keeps."""
    group = n_heads // n_kv_heads
    row = qkv + 4 * b * (n_heads + 2 * n_kv_heads) * width
    cosines, sines = f32_at(rotation[0] + 4 * b * rotation_row), f32_at(rotation[1] + 4 * b * rotation_row)
    rotated = f32_at(buffer)
    queries = row + 4 * h * group * width
    for g in range(group):
        query = f32_at(queries + 4 * g * width)
        _rotate(query, cosines, sines, width, rotated)
        for j in range(width):
            query[j] = rotated[j]
    last = i64_at(counts)[b] - 1
    block = i64_at(table)[b * n_blocks + last // block_size]
    place = 4 * (block * block_stride + h * head_stride + last % block_size * width)
    _rotate(f32_at(row + 4 * (n_heads + h) * width), cosines, sines, width, f32_at(keys + place))
    value, kept = f32_at(row + 4 * (n_heads + n_kv_heads + h) * width), f32_at(values + place)
    for j in range(width):
        kept[j] = value[j]
    head = 4 * h * head_stride
    attend_to_float32(
        queries, keys + head, values + head, 0, 0, mixed + 4 * (b * n_heads + h * group) * width, counts + 8 * b,
        table + 8 * b * n_blocks, 0, 1, 1, group, width, n_blocks, block_size, block_stride, head_stride, longest,
        scale, 0, buffer,
    )  # fmt: skip


MATRIX = 8
"""Numbers that describe a matrix, see `_multiply`."""
LAYER = 4 + 4 * MATRIX
"""Numbers that describe a layer: addresses of the gains of its norms and of its keys and values, and its matrices: of
queries, keys and values; of the output; of gate and up; and of down."""


@CompiledFunction.with_options(fastmath=FASTMATH)
def decode(given):
    """Run through all layers, as one of the threads of a team.

    `given` is the address of int64: the addresses of omp_get_thread_num, omp_get_num_threads and GOMP_barrier, or 0 for
    no team; then those that the assignment below names. x is float32 [sequences, d_model] and becomes the residual
    stream after the last block. Sequence b has counts[b] tokens with its new one, in blocks table[b] of keys and
    values, as in `attend_float32`.
    """
    a = i64_at(given)
    thread, n_threads, barrier = 0, 1, a[2]
    if barrier:
        thread, n_threads = _asked(a[0]), _asked(a[1])
    x, layers, n_layers, n_sequences, d_model, d_ff = a[3], a[4], a[5], a[6], a[7], a[8]
    n_heads, n_kv_heads, width, eps, scale = a[9], a[10], a[11], float_argument(a[12]), a[13]
    counts, table, n_blocks, block_size, block_stride, head_stride, longest = (
        a[14], a[15], a[16], a[17], a[18], a[19], a[20],
    )  # fmt: skip
    rotation_row, shared, own, own_bytes, widest = a[23], a[24], a[25], a[26], a[27]
    rotation = i64_at(given + 8 * 21)

    qkv_width, mixed_width = (n_heads + 2 * n_kv_heads) * width, n_heads * width
    qkv = shared
    mixed = qkv + 4 * n_sequences * qkv_width
    wide = mixed + 4 * n_sequences * mixed_width
    written = wide + 4 * n_sequences * 2 * d_ff
    row = own + thread * own_bytes
    pieces = (widest + PIECE - 1) // PIECE
    numbers = row + 4 * pieces * PIECE
    scales = numbers + number_bytes(pieces) * n_sequences
    sums = scales + 4 * pieces * n_sequences
    # Sums are read in eights.
    buffer = sums + 4 * pieces * n_sequences + 32
    stream, result, gated = f32_at(x), f32_at(written), f32_at(wide)

    for layer in range(n_layers):
        at = layers + 8 * LAYER * layer
        of_layer = i64_at(at)
        of_qkv, of_output = i64_at(at + 8 * 4), i64_at(at + 8 * (4 + MATRIX))
        of_gate_up, of_down = i64_at(at + 8 * (4 + 2 * MATRIX)), i64_at(at + 8 * (4 + 3 * MATRIX))

        _norm_to_integers(x, of_layer[0], eps, n_sequences, d_model, of_qkv[7] != INT8, row, numbers, scales, sums)
        first, last = _share(qkv_width, thread, n_threads), _share(qkv_width, thread + 1, n_threads)
        _multiply(of_qkv, numbers, scales, sums, qkv, qkv_width, first, last, n_sequences, buffer)
        _wait(barrier)

        for item in range(thread, n_sequences * n_kv_heads, n_threads):
            _attend(
                qkv, mixed, of_layer[2], of_layer[3], rotation, counts, table, item // n_kv_heads, item % n_kv_heads,
                n_heads, n_kv_heads, width, n_blocks, block_size, block_stride, head_stride, longest, scale,
                rotation_row, buffer,
            )  # fmt: skip
        _wait(barrier)

        _norm_to_integers(mixed, 0, eps, n_sequences, mixed_width, of_output[7] != INT8, row, numbers, scales, sums)
        first, last = _share(d_model, thread, n_threads), _share(d_model, thread + 1, n_threads)
        _multiply(of_output, numbers, scales, sums, written, d_model, first, last, n_sequences, buffer)
        for b in range(n_sequences):
            for i in range(b * d_model + first, b * d_model + last):
                stream[i] += result[i]
        _wait(barrier)

        _norm_to_integers(x, of_layer[1], eps, n_sequences, d_model, of_gate_up[7] != INT8, row, numbers, scales, sums)
        first, last = _share(d_ff, thread, n_threads), _share(d_ff, thread + 1, n_threads)
        _multiply(of_gate_up, numbers, scales, sums, wide, 2 * d_ff, first, last, n_sequences, buffer)
        _multiply(of_gate_up, numbers, scales, sums, wide, 2 * d_ff, d_ff + first, d_ff + last, n_sequences, buffer)
        for b in range(n_sequences):
            for i in range(2 * b * d_ff + first, 2 * b * d_ff + last):
                gated[i] = gated[i] * sigmoid(gated[i]) * gated[i + d_ff]
        _wait(barrier)

        # Of each sequence, the first half of what gate and up made is what down reads.
        pieces_of_ff = (d_ff + PIECE - 1) // PIECE
        for b in range(n_sequences):
            _norm_to_integers(
                wide + 8 * b * d_ff, 0, eps, 1, d_ff, of_down[7] != INT8, row, numbers + number_bytes(pieces_of_ff) * b,
                scales + 4 * pieces_of_ff * b, sums + 4 * pieces_of_ff * b,
            )  # fmt: skip
        first, last = _share(d_model, thread, n_threads), _share(d_model, thread + 1, n_threads)
        _multiply(of_down, numbers, scales, sums, written, d_model, first, last, n_sequences, buffer)
        for b in range(n_sequences):
            for i in range(b * d_model + first, b * d_model + last):
                stream[i] += result[i]
        _wait(barrier)
