"""Attention of one query per sequence to keys and values in int8, compiled for a CPU: see compiled_decode.py.

Reading keys and values takes the time, and these are half as many bytes as in bf16.
"""

from typing import Any

import numpy as np

from napkin.kernels.compiled_decode import array, capped, compiled, exponentials, f32_at, i8_at, i64_at, u16_at, widened


@compiled("void(" + ", ".join(["int64"] * 15) + ", float32, float32)")
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
) -> None:
    """As `attend`, for keys and values int8 [block, n_kv_heads, block_size, width] without gaps.

    Their scales are bf16 [block, n_kv_heads, block_size].
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
            for first in range(0, n_seen, block_size):
                place = (blocks[b, first // block_size] * n_kv_heads + h) * block_size
                key = array(i8_at(keys + place * width), (block_size, width))
                sizes = array(u16_at(key_scales + 2 * place), (block_size,))
                for t in range(min(block_size, n_seen - first)):
                    factor = scale * widened(sizes[t])
                    for g in range(group):
                        score = np.float32(0)
                        for c in range(width):
                            score += np.float32(key[t, c]) * query[b, h * group + g, c]
                        score = capped(score * factor, cap)
                        scores[g, first + t] = score
                        largest[g] = max(largest[g], score)
            for g in range(group):
                total[g] = np.float32(1) / exponentials(scores, g, n_seen, largest[g])
                for c in range(width):
                    result[b, h * group + g, c] = np.float32(0)
            for first in range(0, n_seen, block_size):
                place = (blocks[b, first // block_size] * n_kv_heads + h) * block_size
                value = array(i8_at(values + place * width), (block_size, width))
                sizes = array(u16_at(value_scales + 2 * place), (block_size,))
                for t in range(min(block_size, n_seen - first)):
                    factor = widened(sizes[t])
                    for g in range(group):
                        weight = scores[g, first + t] * total[g] * factor
                        for c in range(width):
                            result[b, h * group + g, c] += weight * np.float32(value[t, c])
