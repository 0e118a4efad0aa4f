"""Attention of one query per sequence to keys and values in float32, compiled: see decode_attention.py.

torch's own would first need the blocks of each sequence copied side by side, which takes longer than reading them.
"""

from typing import Any

import numpy as np

from napkin.kernels.compiled.decode_attention import LEAST, capped, exponentials
from napkin.kernels.compiled.number_conversions import FASTMATH, float_argument
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f32_at, i64_at


@CompiledFunction.with_options(fastmath=FASTMATH)
def attend_wide(
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
    """As `attend`, for keys and values in float32."""
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
                place = 4 * (blocks[b * n_blocks + first // block_size] * block_stride + h * head_stride)
                for t in range(min(block_size, n_seen - first)):
                    key = f32_at(keys + place + 4 * t * width)
                    for g in range(group):
                        score = np.float32(0)
                        for c in range(width):
                            score += key[c] * query[g * width + c]
                        score = capped(score * factor, bound)
                        scores[g * longest + first + t] = score
                        largest[g] = max(largest[g], score)
            for g in range(group):
                # From here on, the reciprocal of the sum.
                largest[g] = np.float32(1) / exponentials(scores, g * longest, n_seen, largest[g])
                for c in range(width):
                    result[g * width + c] = np.float32(0)
            for first in range(0, n_seen, block_size):
                place = 4 * (blocks[b * n_blocks + first // block_size] * block_stride + h * head_stride)
                for t in range(min(block_size, n_seen - first)):
                    value = f32_at(values + place + 4 * t * width)
                    for g in range(group):
                        weight = scores[g * longest + first + t] * largest[g]
                        for c in range(width):
                            result[g * width + c] += weight * value[c]
