"""Attention of one query per sequence to keys and values in blocks, compiled.

It reads every key and value once, so memory sets the speed; torch's fused attention of one query reads at a tenth of
it. Numbers are widened to fp32 in registers and summed in fp32.
"""

from typing import Any

import numpy as np

from napkin.kernels.compiled.number_conversions import FASTMATH, bf16_at, exponential, float_argument, widened
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with
from napkin.machine_code.pointers import f32_at, i64_at

LEAST = np.float32(-3e38)
"""Below every score."""


@jitted_with(fastmath=FASTMATH, inline="always")
def capped(score: Any, cap: Any) -> Any:
    """cap · tanh(score / cap), with e^x of what is not above 0 alone; the score itself if cap is 0."""
    if cap > 0:
        small = exponential(-abs(score) * np.float32(2) / cap)
        bounded = cap * (np.float32(1) - small) / (np.float32(1) + small)
        return bounded if score > 0 else -bounded
    return score


@jitted_with(fastmath=FASTMATH, inline="always")
def exponentials(scores: Any, start: Any, n: Any, largest: Any) -> Any:
    """Make n scores from `start` on e^(score - largest); their sum."""
    total = np.float32(0)
    for t in range(start, start + n):
        e = exponential(scores[t] - largest)
        scores[t] = e
        total += e
    return total


@CompiledFunction.with_options(fastmath=FASTMATH)
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
    buffer: Any,
) -> None:
    """Each query's softmax over the first counts[b] slots of its sequence, whose blocks table[b] numbers.

    queries and mixed are float32 [n_sequences, n_kv_heads · group, width]; keys and values are bf16 with those strides
    between blocks and heads, in numbers. counts and table are int64; scores are capped unless cap is 0. The buffer
    holds group · (longest + 1) float32.
    """
    seen, blocks = i64_at(counts), i64_at(table)
    factor, bound = float_argument(scale), float_argument(cap)
    scores, largest = f32_at(buffer), f32_at(buffer + 4 * group * longest)
    for b in range(n_sequences):
        n_seen = seen[b]
        for h in range(n_kv_heads):
            rows = 4 * (b * n_kv_heads + h) * group * width
            query, result = f32_at(queries + rows), f32_at(mixed + rows)
            for g in range(group):
                largest[g] = LEAST
            for first in range(0, n_seen, block_size):
                place = 2 * (blocks[b * n_blocks + first // block_size] * block_stride + h * head_stride)
                for t in range(min(block_size, n_seen - first)):
                    key = bf16_at(keys + place + 2 * t * width)
                    for g in range(group):
                        score = np.float32(0)
                        for c in range(width):
                            score += widened(key[c]) * query[g * width + c]
                        score = capped(score * factor, bound)
                        scores[g * longest + first + t] = score
                        largest[g] = max(largest[g], score)
            for g in range(group):
                # From here on, the reciprocal of the sum.
                largest[g] = np.float32(1) / exponentials(scores, g * longest, n_seen, largest[g])
                for c in range(width):
                    result[g * width + c] = np.float32(0)
            for first in range(0, n_seen, block_size):
                place = 2 * (blocks[b * n_blocks + first // block_size] * block_stride + h * head_stride)
                for t in range(min(block_size, n_seen - first)):
                    value = bf16_at(values + place + 2 * t * width)
                    for g in range(group):
                        weight = scores[g * longest + first + t] * largest[g]
                        for c in range(width):
                            result[g * width + c] += weight * widened(value[c])
