"""Output head and softmax of a language model without a gradient, in bf16, compiled: no logit leaves the cache.

A block of the vocabulary is packed once for all rows of a thread and stays in the second cache. The logits of eight
rows with it, float32, stay in the first while their largest and the sum of their exponentials join those of the blocks
before: with a new largest m', a sum s of e^(x - m) becomes s · e^(m - m').
"""

from math import log

import numpy as np

from napkin.kernels.attention.numba_tiles import copy_rows, multiply, pack_columns
from napkin.kernels.numba_numbers import FASTMATH, exponential, float_argument, hyperbolic_tangent, larger
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f32_at, i64_at


@CompiledFunction.with_options(fastmath=FASTMATH)
def head_rows(hidden, weight, targets, target_logits, logsumexps, start, stop, vocab, width, columns, softcap, buffer):
    """Compute the target's logit and logsumexp of hidden · weightᵀ of the rows start to stop.

    Both matrices are bf16, their rows `width` numbers, a multiple of 32, one after the other. Logits are bounded by a
    softcap unless it is 0. A block has `columns` of them, a multiple of 32. The buffer holds columns · (width / 2 + 8)
    + 4 · width + stop - start float32.
    """
    packed, scores = buffer, buffer + 2 * columns * width
    padded = scores + 32 * columns
    tops = f32_at(padded + 16 * width)
    target_of, target_logit_of, sum_of = i64_at(targets), f32_at(target_logits), f32_at(logsumexps)
    cap = float_argument(softcap)
    for i in range(start, stop):
        tops[i - start] = np.float32(-np.inf)
        sum_of[i] = np.float32(0)
    for first in range(0, vocab, columns):
        n = min(columns, vocab - first)
        n_padded = (n + 31) // 32 * 32
        pack_columns(weight + 2 * first * width, 2 * width, n, n_padded, width, packed)
        for begin in range(start, stop, 8):
            rows, n_rows = hidden + 2 * begin * width, min(8, stop - begin)
            if n_rows < 8:
                copy_rows(rows, 2 * width, n_rows, 8, width, padded)
                rows = padded
            multiply(rows, 2 * width, 4, 8, packed, 64 * width, width // 2, scores, 4 * columns, n_padded)
            for i in range(begin, begin + n_rows):
                row = f32_at(scores + 4 * (i - begin) * columns)
                if cap > 0:
                    for j in range(n):
                        row[j] = cap * hyperbolic_tangent(row[j] / cap)
                place = target_of[i] - first
                if 0 <= place < n:
                    target_logit_of[i] = row[place]
                before = tops[i - start]
                top = before
                for j in range(n):
                    top = larger(top, row[j])
                total = sum_of[i] * exponential(before - top)
                for j in range(n):
                    total += exponential(row[j] - top)
                tops[i - start], sum_of[i] = top, total
    for i in range(start, stop):
        sum_of[i] = tops[i - start] + np.float32(log(sum_of[i]))
