"""Rows of attention's scores, compiled: scores become weights, and the weights' gradient that of the scores.

A row belongs to one query and sees one run of keys; keys outside the run get a weight of 0 and cost nothing.
"""

from math import log

import numpy as np

from napkin.kernels.attention.numba_softmax import exponentiate_scores, weigh_again
from napkin.kernels.numba_numbers import (
    FASTMATH,
    bf16_at,
    float_argument,
    hyperbolic_tangent,
    narrow_row,
    narrow_scaled_row,
    widen_row,
    widened,
    zero_row,
)
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with
from napkin.machine_code.pointers import f32_at, i64_at


@jitted_with(fastmath=FASTMATH)
def bound_scores(row, slope, n, scale, cap):
    """row = cap · tanh(scale · row / cap), and its slope with respect to the scaled scores."""
    for j in range(n):
        bounded = hyperbolic_tangent(row[j] * scale / cap)
        slope[j] = np.float32(1) - bounded * bounded
        row[j] = cap * bounded


@CompiledFunction.with_options(fastmath=FASTMATH)
def weights_of_scores(
    scores, is_bf16, logsumexps, first_keys, start, stop, n_queries, n_keys, rows_per_sequence, offset, scale, cap,
    buffer,
):  # fmt: skip
    """The rows start to stop of scores [rows, n_keys] become their softmax; logsumexps are kept, float32.

    Row i is query i mod n_queries, which stands at position offset + i mod n_queries and sees the keys from
    first_keys[i div rows_per_sequence, that position's place among the n_queries] to itself. Scores are q · k;
    the scale is applied here. The buffer holds twice n_keys float32, rounded up to a multiple of 32.
    """
    n_padded = (n_keys + 31) // 32 * 32
    row, slope = f32_at(buffer), f32_at(buffer + 4 * n_padded)
    logsumexp_of, first_of = f32_at(logsumexps), i64_at(first_keys)
    scaled, capped = float_argument(scale), float_argument(cap)
    for i in range(start, stop):
        query = i % n_queries
        first = first_of[i // rows_per_sequence * n_queries + query]
        n = min(offset + query + 1, n_keys) - first
        begin = i * n_keys
        widen_row(scores, is_bf16, begin + first, n, row)
        factor = scaled
        if capped > 0:
            bound_scores(row, slope, n, scaled, capped)
            factor = np.float32(1)
        largest, total = exponentiate_scores(buffer, (n + 31) // 32 * 32, 0, n, factor)
        logsumexp_of[i] = largest + np.float32(log(total))
        narrow_scaled_row(row, np.float32(1) / total, scores, is_bf16, begin + first, n)
        zero_row(scores, is_bf16, begin, first)
        zero_row(scores, is_bf16, begin + first + n, n_keys - first - n)


@CompiledFunction.with_options(fastmath=FASTMATH)
def score_gradients(
    scores, gradients, is_bf16, logsumexps, first_keys, start, stop, n_queries, n_keys, rows_per_sequence, offset,
    scale, cap, buffer,
):  # fmt: skip
    """Turn scores into weights again, and the gradients of weights into those of q · k for the same rows: the softmax's
    p · (g - Σ p · g), times the slope of the cap, times the scale.

    The buffer holds three times n_keys float32, rounded up to a multiple of 32.
    """
    n_padded = (n_keys + 31) // 32 * 32
    grads = buffer + 8 * n_padded
    row, slope, grad = f32_at(buffer), f32_at(buffer + 4 * n_padded), f32_at(grads)
    logsumexp_of, first_of = f32_at(logsumexps), i64_at(first_keys)
    scaled, capped = float_argument(scale), float_argument(cap)
    for i in range(start, stop):
        query = i % n_queries
        first = first_of[i // rows_per_sequence * n_queries + query]
        n = min(offset + query + 1, n_keys) - first
        begin = i * n_keys
        widen_row(scores, is_bf16, begin + first, n, row)
        widen_row(gradients, is_bf16, begin + first, n, grad)
        factor = scaled
        if capped > 0:
            bound_scores(row, slope, n, scaled, capped)
            factor = np.float32(1)
        along = weigh_again(buffer, grads, (n + 31) // 32 * 32, 0, n, factor, logsumexp_of[i])
        for j in range(n):
            grad[j] = row[j] * (grad[j] - along) * scaled
        if capped > 0:
            for j in range(n):
                grad[j] *= slope[j]
        for address, values in ((scores, row), (gradients, grad)):
            narrow_row(values, address, is_bf16, begin + first, n)
            zero_row(address, is_bf16, begin, first)
            zero_row(address, is_bf16, begin + first + n, n_keys - first - n)


@CompiledFunction.with_options(fastmath=FASTMATH)
def add_rows(sums, parts, is_bf16, start, stop, n_part, n_sum, width, buffer):
    """sums[h, r] += parts[h, r] for the rows start to stop of parts [heads, n_part, width]; sums [heads, n_sum, width]
    are float32."""
    totals, wide, narrow = f32_at(sums), f32_at(parts), bf16_at(parts)
    for i in range(start, stop):
        begin, to = i * width, (i // n_part * n_sum + i % n_part) * width
        if is_bf16:
            for j in range(width):
                totals[to + j] += widened(narrow[begin + j])
        else:
            for j in range(width):
                totals[to + j] += wide[begin + j]
