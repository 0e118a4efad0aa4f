"""Attention of one query per sequence to keys and values in int8, compiled: see decode_attention.py.

Reading keys and values takes the time, and these are half as many bytes as in bf16.
"""

from typing import Any

import numpy as np

from napkin.kernels.compiled.decode_attention import LEAST, capped, exponentials
from napkin.kernels.compiled.number_conversions import FASTMATH, bf16_at, float_argument, widened
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f32_at, i8_at, i64_at


@CompiledFunction.with_options(fastmath=FASTMATH)
def attend_int8(
    queries: Any,
    keys: Any,
    key_scales: Any,
    values: Any,
    value_scales: Any,
    mixed: Any,
    counts: Any,
    table: Any,
    n_sequences: Any,
    n_kv_heads: Any,
    group: Any,
    width: Any,
    n_blocks: Any,
    block_size: Any,
    longest: Any,
    scale: Any,
    cap: Any,
    buffer: Any,
) -> None:
    """As `attend`, for keys and values int8 [block, n_kv_heads, block_size, width] without gaps.

    Their scales are bf16 [block, n_kv_heads, block_size].
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
                place = (blocks[b * n_blocks + first // block_size] * n_kv_heads + h) * block_size
                sizes = bf16_at(key_scales + 2 * place)
                for t in range(min(block_size, n_seen - first)):
                    key = i8_at(keys + (place + t) * width)
                    size = factor * widened(sizes[t])
                    for g in range(group):
                        score = np.float32(0)
                        for c in range(width):
                            score += np.float32(key[c]) * query[g * width + c]
                        score = capped(score * size, bound)
                        scores[g * longest + first + t] = score
                        largest[g] = max(largest[g], score)
            for g in range(group):
                # From here on, the reciprocal of the sum.
                largest[g] = np.float32(1) / exponentials(scores, g * longest, n_seen, largest[g])
                for c in range(width):
                    result[g * width + c] = np.float32(0)
            for first in range(0, n_seen, block_size):
                place = (blocks[b * n_blocks + first // block_size] * n_kv_heads + h) * block_size
                sizes = bf16_at(value_scales + 2 * place)
                for t in range(min(block_size, n_seen - first)):
                    value = i8_at(values + (place + t) * width)
                    size = widened(sizes[t])
                    for g in range(group):
                        weight = scores[g * longest + first + t] * largest[g] * size
                        for c in range(width):
                            result[g * width + c] += weight * np.float32(value[c])
