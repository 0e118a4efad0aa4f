"""The rows of a language model's loss, compiled: logits become their gradient in one pass over a row that stays in
cache."""

from math import log

import numpy as np

from napkin.kernels.numba_numbers import (
    FASTMATH,
    bf16_at,
    exponentiate_row,
    float_argument,
    hyperbolic_tangent,
    narrow_scaled_row,
    widen_row,
    widened,
)
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f32_at, i64_at


@CompiledFunction.with_options(fastmath=FASTMATH)
def loss_rows(
    logits, is_bf16, targets, target_logits, logsumexps, entropies, start, stop, n, softcap, z_weight, with_gradient,
    with_entropies, buffer,
):  # fmt: skip
    """Compute the target's logit and logsumexp of the rows start to stop of logits [rows, n]; with_entropies, the
    entropy of their softmax; with_gradient, each row becomes the gradient of logsumexp - logits[target] + z_weight ·
    logsumexp².

    Logits are bounded by a softcap unless it is 0. The buffer holds 3 · n float32.
    """
    row, slope, kept = f32_at(buffer), f32_at(buffer + 4 * n), f32_at(buffer + 8 * n)
    target_of, target_logit_of, logsumexp_of = i64_at(targets), f32_at(target_logits), f32_at(logsumexps)
    entropy_of = f32_at(entropies)
    cap, z = float_argument(softcap), float_argument(z_weight)
    for i in range(start, stop):
        widen_row(logits, is_bf16, i * n, n, row)
        if cap > 0:
            for j in range(n):
                bounded = hyperbolic_tangent(row[j] / cap)
                slope[j] = np.float32(1) - bounded * bounded
                row[j] = cap * bounded
        target = target_of[i]
        target_logit_of[i] = row[target]
        if with_entropies:
            for j in range(n):
                kept[j] = row[j]
        largest, total = exponentiate_row(row, n)
        logsumexp = largest + np.float32(log(total))
        logsumexp_of[i] = logsumexp
        if with_entropies:
            # -Σ p · log p, where log p = logit - largest - log(total).
            below = np.float32(0)
            for j in range(n):
                below += row[j] * (largest - kept[j])
            entropy_of[i] = below / total + np.float32(log(total))
        if with_gradient:
            # The gradient of logsumexp² is 2 · logsumexp · softmax.
            factor = (np.float32(1) + np.float32(2) * z * logsumexp) / total
            row[target] -= np.float32(1) / factor
            if cap > 0:
                for j in range(n):
                    row[j] *= slope[j]
            narrow_scaled_row(row, factor, logits, is_bf16, i * n, n)


@CompiledFunction.with_options(fastmath=FASTMATH)
def add_narrow(total, part, start, stop, buffer):
    """Add the bf16 numbers start to stop to those of a float32 total."""
    wide, narrow = f32_at(total), bf16_at(part)
    for j in range(start, stop):
        wide[j] += widened(narrow[j])
