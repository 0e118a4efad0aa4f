"""All blocks of a model for new tokens of some sequences, compiled: pre-norm blocks with RMSNorm or LayerNorm, rotated
queries and keys or none, SwiGLU or GELU, and matrices of integers, bf16 or float32. Before them the tokens' vectors may
be looked up, after them the last norm and the head computed.

Operator by operator, a small model's token is mostly the calls of its operators, and a large one drives what they need
out of the caches. Here all threads of a team run through all layers, each with its share of the rows of every matrix,
and wait for each other where one reads what all wrote. What is short, as a norm, each thread computes for itself.

Numbers between products are float32. In a model of bf16 they are rounded where its modules round them.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from napkin.kernels.attention.numba_decode import attend_to_bf16, attend_to_float32
from napkin.kernels.numba_numbers import (
    FASTMATH,
    bf16_at,
    float_argument,
    narrow_row,
    narrowed,
    sigmoid,
    widen_row,
    widened,
)
from napkin.kernels.pointwise.numba_pointwise import gelu_tanh
from napkin.kernels.products.numba_dense import multiply_bf16, multiply_float32
from napkin.kernels.products.numba_dots import fetch
from napkin.kernels.products.numba_forms import NUMBERS, PIECE
from napkin.kernels.products.numba_integers import multiply_rows, take_integers
from napkin.kernels.products.numba_quantized import vector_bytes
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with
from napkin.machine_code.pointers import f32_at, i64_at, operation

NO_NORM, RMS_NORM, LAYER_NORM = range(3)
SWIGLU, GELU_TANH = range(2)

_FIRST_BYTES = 2048
"""Bytes of the keys, and of the values, of a head that are fetched before they are needed."""

_I32 = ir.IntType(32)


@operation("int64(int64)")
def _asked(builder: Any, address: Any) -> Any:
    """Call the C function at an address, which takes no arguments and returns an int."""
    function = builder.inttoptr(address, ir.FunctionType(_I32, []).as_pointer())
    return builder.sext(builder.call(function, []), address.type)


@operation("void(int64)")
def _call(builder: Any, address: Any) -> None:
    """Call the C function at an address, which has neither arguments nor a result."""
    builder.call(builder.inttoptr(address, ir.FunctionType(ir.VoidType(), []).as_pointer()), [])


@jitted_with(inline="always")
def _wait(barrier):
    if barrier:
        _call(barrier)


@jitted_with(inline="always")
def _share(n, thread, n_threads):
    """First row of a thread's share of n rows, a multiple of four."""
    return n if thread == n_threads else n // 4 * thread // n_threads * 4


@jitted_with(fastmath=FASTMATH)
def _norm_row(x, gain, shift, norm, is_bf16, eps, n, row):
    """row = the norm of n float32 at x, without one the numbers themselves; gain and shift are addresses of numbers in
    the model's format, a shift of 0 is none."""
    wide, normed = f32_at(x), f32_at(row)
    mean, squares = np.float32(0), np.float32(0)
    if norm == NO_NORM:
        for j in range(n):
            normed[j] = wide[j]
        return
    if norm == LAYER_NORM:
        for j in range(n):
            mean += wide[j]
        mean /= np.float32(n)
    for j in range(n):
        squares += (wide[j] - mean) * (wide[j] - mean)
    factor = np.float32(1) / np.float32(np.sqrt(squares / np.float32(n) + eps))
    if is_bf16:
        narrow = bf16_at(gain)
        for j in range(n):
            normed[j] = (wide[j] - mean) * factor * widened(narrow[j])
        if shift:
            narrow = bf16_at(shift)
            for j in range(n):
                normed[j] += widened(narrow[j])
    else:
        gains = f32_at(gain)
        for j in range(n):
            normed[j] = (wide[j] - mean) * factor * gains[j]
        if shift:
            shifts = f32_at(shift)
            for j in range(n):
                normed[j] += shifts[j]


@jitted_with(fastmath=FASTMATH)
def _take(x, x_row, gain, shift, norm, is_bf16, eps, n_rows, n, matrix, row, numbers, scales, sums):
    """The numbers that a matrix is multiplied by, of the norms of rows of n float32, x_row apart; see `_multiply`."""
    for b in range(n_rows):
        _norm_row(x + 4 * b * x_row, gain, shift, norm, is_bf16, eps, n, row)
        if matrix[7] == NUMBERS:
            narrow_row(f32_at(row), numbers, is_bf16, b * n, n)
            continue
        if is_bf16:
            _round(row, n)
            if matrix[8]:
                _scale(row, matrix[8], n)
        of_pieces = 4 * matrix[4] * b
        take_integers(
            row, n, matrix[4], matrix[5], matrix[7], numbers + vector_bytes(matrix[4]) * b, scales + of_pieces,
            sums + of_pieces,
        )  # fmt: skip


@jitted_with(fastmath=FASTMATH)
def _scale(row, factors, n):
    """Multiply n float32 by factors in bf16, and round them to it."""
    numbers, narrow = f32_at(row), bf16_at(factors)
    for j in range(n):
        numbers[j] = widened(narrowed(numbers[j] * widened(narrow[j])))


@jitted_with(fastmath=FASTMATH)
def _multiply(matrix, is_bf16, numbers, scales, sums, y, y_row, start, stop, n_rows, buffer):
    """The products with the rows start to stop of a matrix, and its biases; `matrix` are the nine numbers that
    describe it: addresses of values, scales, offsets and biases; pieces of a row, or its numbers where it has no
    integers; groups of a row, the format of its scales, and its form; and the address of factors of what it is
    multiplied by, or 0."""
    if matrix[7] != NUMBERS:
        multiply_rows(
            numbers, scales, sums, matrix[0], matrix[1], matrix[2], y, start, stop, n_rows, matrix[4], matrix[5],
            matrix[6], y_row, matrix[7], buffer,
        )  # fmt: skip
    elif is_bf16:
        multiply_bf16(numbers, matrix[0], y, start, stop, n_rows, matrix[4], y_row)
    else:
        multiply_float32(numbers, matrix[0], y, start, stop, n_rows, matrix[4], y_row)
    result, n = f32_at(y), stop - start
    if matrix[3]:
        biases = f32_at(buffer)
        widen_row(matrix[3], is_bf16, start, n, biases)
        for b in range(n_rows):
            for i in range(n):
                result[b * y_row + start + i] += biases[i]
    if is_bf16:
        for b in range(n_rows):
            _round(y + 4 * (b * y_row + start), n)


@jitted_with(fastmath=FASTMATH)
def _round(row, n):
    """Round n float32 to bf16."""
    numbers = f32_at(row)
    for j in range(n):
        numbers[j] = widened(narrowed(numbers[j]))


@jitted_with(fastmath=FASTMATH)
def _add(x, written, is_bf16, n_rows, n, start, stop):
    """x += what was written, of the columns start to stop."""
    stream, result = f32_at(x), f32_at(written)
    for b in range(n_rows):
        for i in range(b * n + start, b * n + stop):
            stream[i] += result[i]
        if is_bf16:
            _round(x + 4 * (b * n + start), stop - start)


@jitted_with(fastmath=FASTMATH)
def _activate(wide, wide_row, activation, d_ff, n_rows, start, stop):
    """The numbers start to stop that the down matrix reads, in place of the gates or what is activated."""
    numbers = f32_at(wide)
    for b in range(n_rows):
        first = b * wide_row
        if activation == SWIGLU:
            for i in range(first + start, first + stop):
                numbers[i] = numbers[i] * sigmoid(numbers[i]) * numbers[i + d_ff]
        else:
            for i in range(first + start, first + stop):
                numbers[i] = gelu_tanh(numbers[i])


@jitted_with(fastmath=FASTMATH)
def _rotate(vector, cosines, signed_sines, width, to):
    """to = the vector with the numbers of both halves rotated as pairs."""
    half = width // 2
    for j in range(half):
        to[j] = vector[j] * cosines[j] + vector[j + half] * signed_sines[j]
        to[j + half] = vector[j + half] * cosines[j + half] + vector[j] * signed_sines[j + half]


@jitted_with(fastmath=FASTMATH)
def _keep(
    qkv, keys, values, is_bf16, rotation, counts, table, b, h, n_heads, n_kv_heads, width, n_blocks, block_size,
    block_stride, head_stride, rotation_row, buffer,
):  # fmt: skip
    """Keep the key and the value of key head h of row b, and rotate it and the queries that read it."""
    group = n_heads // n_kv_heads
    row = qkv + 4 * b * (n_heads + 2 * n_kv_heads) * width
    last = i64_at(counts)[b] - 1
    block = i64_at(table)[b * n_blocks + last // block_size]
    place = block * block_stride + h * head_stride + last % block_size * width
    key, value = row + 4 * (n_heads + h) * width, row + 4 * (n_heads + n_kv_heads + h) * width
    if rotation[0]:
        rotated = f32_at(buffer)
        cosines, sines = f32_at(rotation[0] + 4 * b * rotation_row), f32_at(rotation[1] + 4 * b * rotation_row)
        for g in range(group):
            query = f32_at(row + 4 * (h * group + g) * width)
            _rotate(query, cosines, sines, width, rotated)
            for j in range(width):
                query[j] = rotated[j]
        if is_bf16:
            _round(row + 4 * h * group * width, group * width)
        _rotate(f32_at(key), cosines, sines, width, rotated)
        narrow_row(rotated, keys, is_bf16, place, width)
    else:
        narrow_row(f32_at(key), keys, is_bf16, place, width)
    narrow_row(f32_at(value), values, is_bf16, place, width)


@jitted_with(fastmath=FASTMATH)
def _attend(
    qkv, mixed, keys, values, is_bf16, counts, table, b, h, n_heads, n_kv_heads, width, n_blocks, block_size,
    block_stride, head_stride, longest, scale, buffer,
):  # fmt: skip
    """Attention of the queries of row b that read key head h."""
    group = n_heads // n_kv_heads
    queries = qkv + 4 * (b * (n_heads + 2 * n_kv_heads) + h * group) * width
    to = mixed + 4 * (b * n_heads + h * group) * width
    if is_bf16:
        head = 2 * h * head_stride
        attend_to_bf16(
            queries, keys + head, values + head, 0, 0, to, counts + 8 * b, table + 8 * b * n_blocks, 0, 1, 1, group,
            width, n_blocks, block_size, block_stride, head_stride, longest, scale, 0, buffer,
        )  # fmt: skip
    else:
        head = 4 * h * head_stride
        attend_to_float32(
            queries, keys + head, values + head, 0, 0, to, counts + 8 * b, table + 8 * b * n_blocks, 0, 1, 1, group,
            width, n_blocks, block_size, block_stride, head_stride, longest, scale, 0, buffer,
        )  # fmt: skip


@jitted_with(fastmath=FASTMATH)
def _embed(embedding, token, scale, positions, position, is_bf16, n, x):
    """x = the vector of a token, n float32 times a scale, and that of its position, unless positions is 0."""
    numbers = f32_at(x)
    widen_row(embedding, is_bf16, token * n, n, numbers)
    for j in range(n):
        numbers[j] *= scale
    if is_bf16:
        _round(x, n)
    if positions:
        if is_bf16:
            narrow = bf16_at(positions)
            for j in range(n):
                numbers[j] += widened(narrow[position * n + j])
            _round(x, n)
        else:
            wide = f32_at(positions)
            for j in range(n):
                numbers[j] += wide[position * n + j]


@jitted_with(fastmath=FASTMATH)
def _fetch_first(
    keys, values, is_bf16, counts, table, thread, n_threads, n_kv_heads, width, block_size, block_stride, head_stride
):  # fmt: skip
    """Fetch the first keys and values of the heads of a sequence that this thread attends to: memory brings them while
    the queries are computed, and a stream of more of them does not begin by waiting."""
    size = 2 if is_bf16 else 4
    n_bytes = min(size * width * min(i64_at(counts)[0], block_size), _FIRST_BYTES)
    block = size * i64_at(table)[0] * block_stride
    for h in range(thread, n_kv_heads, n_threads):
        place = block + size * h * head_stride
        fetch(keys + place, n_bytes)
        fetch(values + place, n_bytes)


MATRIX = 9
"""Numbers that describe a matrix, see `_multiply`."""
FIRST_MATRIX = 6
LAYER = FIRST_MATRIX + 4 * MATRIX
"""Numbers that describe a layer: addresses of the gains and of the shifts of its norms, of its keys and its values, and
its matrices: of queries, keys and values; of the output; of gate and up; and of down."""


@CompiledFunction.with_options(fastmath=FASTMATH)
def decode(arguments):
    """Run through all layers, as one of the threads of a team.

    `arguments` is the address of int64: the addresses of omp_get_thread_num, omp_get_num_threads and GOMP_barrier, or 0
    for no team; then those that the assignments below name. x is float32 [rows, d_model] and becomes the residual
    stream after the last block; `n_new` rows in a row are new tokens of one sequence. Row b is a token of a sequence
    that has counts[b] tokens with it, in blocks table[b] of keys and values, as in `attend_float32`.

    Unless `embedding` is 0, x is made here of `tokens`. Unless `cosine_table` is 0, `rotation` are float32
    [rows, width] that are taken from both tables here. Unless `head` is 0, its products with the norms of the last
    `n_last` rows are written to `logits`, float32 [n_last, vocab_size].
    """
    a = i64_at(arguments)
    thread, n_threads, barrier = 0, 1, a[2]
    if barrier:
        thread, n_threads = _asked(a[0]), _asked(a[1])
    x, layers, n_layers, n_rows, n_new, d_model, d_ff, is_bf16 = a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]
    norm, activation, n_heads, n_kv_heads, width = a[11], a[12], a[13], a[14], a[15]
    eps, scale, counts, table, n_blocks, block_size = float_argument(a[16]), a[17], a[18], a[19], a[20], a[21]
    block_stride, head_stride, longest, rotation_row = a[22], a[23], a[24], a[27]
    shared, own, own_bytes, widest = a[28], a[29], a[30], a[31]
    rotation = i64_at(arguments + 8 * 25)
    tokens, embedding, input_scale, positions = a[32], a[33], float_argument(a[34]), a[35]
    cosine_table, sine_table, has_bf16_tables = a[36], a[37], a[38]
    last_gain, last_shift, head, vocab_size, logits, n_last = a[39], a[40], a[41], a[42], a[43], a[44]

    qkv_width, mixed_width = (n_heads + 2 * n_kv_heads) * width, n_heads * width
    wide_row = 2 * d_ff if activation == SWIGLU else d_ff
    qkv = shared
    mixed = qkv + 4 * n_rows * qkv_width
    wide = mixed + 4 * n_rows * mixed_width
    written = wide + 4 * n_rows * wide_row
    row = own + thread * own_bytes
    pieces = (widest + PIECE - 1) // PIECE
    numbers = row + 4 * (pieces + 1) * PIECE
    scales = numbers + 4 * (pieces + 5) * PIECE * n_rows
    sums = scales + 4 * pieces * n_rows
    # Sums are read in eights.
    buffer = sums + 4 * pieces * n_rows + 32

    for b in range(thread, n_rows, n_threads):
        position = i64_at(counts)[b] - 1
        if embedding:
            at = x + 4 * b * d_model
            _embed(embedding, i64_at(tokens)[b], input_scale, positions, position, is_bf16, d_model, at)
        if cosine_table:
            first, of_row = position * width, 4 * b * width
            widen_row(cosine_table, has_bf16_tables, first, width, f32_at(rotation[0] + of_row))
            widen_row(sine_table, has_bf16_tables, first, width, f32_at(rotation[1] + of_row))
    if embedding or cosine_table:
        _wait(barrier)

    for layer in range(n_layers):
        at = layers + 8 * LAYER * layer
        of_layer = i64_at(at)
        of_qkv, of_output = i64_at(at + 8 * FIRST_MATRIX), i64_at(at + 8 * (FIRST_MATRIX + MATRIX))
        of_up, of_down = i64_at(at + 8 * (FIRST_MATRIX + 2 * MATRIX)), i64_at(at + 8 * (FIRST_MATRIX + 3 * MATRIX))
        keys, values = of_layer[4], of_layer[5]
        if n_rows == n_new:
            _fetch_first(
                keys, values, is_bf16, counts, table, thread, n_threads, n_kv_heads, width, block_size, block_stride,
                head_stride,
            )  # fmt: skip

        _take(
            x, d_model, of_layer[0], of_layer[2], norm, is_bf16, eps, n_rows, d_model, of_qkv, row, numbers, scales,
            sums,
        )  # fmt: skip
        first, last = _share(qkv_width, thread, n_threads), _share(qkv_width, thread + 1, n_threads)
        _multiply(of_qkv, is_bf16, numbers, scales, sums, qkv, qkv_width, first, last, n_rows, buffer)
        _wait(barrier)

        for item in range(thread, n_rows // n_new * n_kv_heads, n_threads):
            h, first = item % n_kv_heads, item // n_kv_heads * n_new
            # A new token sees those before it.
            for b in range(first, first + n_new):
                _keep(
                    qkv, keys, values, is_bf16, rotation, counts, table, b, h, n_heads, n_kv_heads, width, n_blocks,
                    block_size, block_stride, head_stride, rotation_row, buffer,
                )  # fmt: skip
            for b in range(first, first + n_new):
                _attend(
                    qkv, mixed, keys, values, is_bf16, counts, table, b, h, n_heads, n_kv_heads, width, n_blocks,
                    block_size, block_stride, head_stride, longest, scale, buffer,
                )  # fmt: skip
        _wait(barrier)

        _take(
            mixed, mixed_width, 0, 0, NO_NORM, is_bf16, eps, n_rows, mixed_width, of_output, row, numbers, scales,
            sums,
        )  # fmt: skip
        first, last = _share(d_model, thread, n_threads), _share(d_model, thread + 1, n_threads)
        _multiply(of_output, is_bf16, numbers, scales, sums, written, d_model, first, last, n_rows, buffer)
        _add(x, written, is_bf16, n_rows, d_model, first, last)
        _wait(barrier)

        _take(
            x, d_model, of_layer[1], of_layer[3], norm, is_bf16, eps, n_rows, d_model, of_up, row, numbers, scales,
            sums,
        )  # fmt: skip
        first, last = _share(d_ff, thread, n_threads), _share(d_ff, thread + 1, n_threads)
        _multiply(of_up, is_bf16, numbers, scales, sums, wide, wide_row, first, last, n_rows, buffer)
        if activation == SWIGLU:
            _multiply(of_up, is_bf16, numbers, scales, sums, wide, wide_row, d_ff + first, d_ff + last, n_rows, buffer)
        _activate(wide, wide_row, activation, d_ff, n_rows, first, last)
        _wait(barrier)

        _take(wide, wide_row, 0, 0, NO_NORM, is_bf16, eps, n_rows, d_ff, of_down, row, numbers, scales, sums)
        first, last = _share(d_model, thread, n_threads), _share(d_model, thread + 1, n_threads)
        _multiply(of_down, is_bf16, numbers, scales, sums, written, d_model, first, last, n_rows, buffer)
        _add(x, written, is_bf16, n_rows, d_model, first, last)
        _wait(barrier)

    if head:
        of_head, last_rows = i64_at(head), x + 4 * (n_rows - n_last) * d_model
        _take(
            last_rows, d_model, last_gain, last_shift, norm, is_bf16, eps, n_last, d_model, of_head, row, numbers,
            scales, sums,
        )  # fmt: skip
        first, last = _share(vocab_size, thread, n_threads), _share(vocab_size, thread + 1, n_threads)
        _multiply(of_head, is_bf16, numbers, scales, sums, logits, vocab_size, first, last, n_last, buffer)
