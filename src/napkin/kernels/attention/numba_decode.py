"""Attention of one query per sequence to keys and values in blocks, compiled: one loop for bf16, float32 and int8.

It reads every key and value once, so memory sets the speed. torch's fused attention of one query reads bf16 at a tenth
of it, and float32 only after the blocks of each sequence were copied side by side, which takes longer than reading
them. Numbers are widened to fp32 in registers and summed in fp32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from napkin.kernels.numba_numbers import FASTMATH, bf16_at, exponential, float_argument, widened
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with
from napkin.machine_code.pointers import f32_at, i8_at, i64_at

LEAST = np.float32(-3e38)
"""A number below every score."""


def _attention(
    number_size: int, numbers_at: Callable[..., Any], wide: Callable[..., Any], scaled: bool
) -> Callable[..., Any]:
    """The loop over numbers of so many bytes, their pointers, how one becomes a float32, and whether there are scales:
    all of it is compiled into the loop."""

    def attend(
        queries, keys, values, key_scales, value_scales, mixed, counts, table, start, stop, n_kv_heads, group, width,
        n_blocks, block_size, block_stride, head_stride, longest, scale, cap, buffer,
    ):  # fmt: skip
        """The softmax of each query from start to stop over the first counts[b] slots of its sequence, whose blocks
        table[b] numbers.

        queries and mixed are float32 [sequences, n_kv_heads · group, width]; keys and values have those strides
        between blocks and heads, in numbers, and their scales, if any, are bf16 [block, n_kv_heads, block_size] without
        gaps. counts and table are int64; scores are capped unless cap is 0. The buffer holds group · (longest + 1)
        float32.
        """
        seen, blocks = i64_at(counts), i64_at(table)
        factor, bound = float_argument(scale), float_argument(cap)
        scores, largest = f32_at(buffer), f32_at(buffer + 4 * group * longest)
        for b in range(start, stop):
            n_seen = seen[b]
            for h in range(n_kv_heads):
                rows = 4 * (b * n_kv_heads + h) * group * width
                query, result = f32_at(queries + rows), f32_at(mixed + rows)
                for g in range(group):
                    largest[g] = LEAST
                for first in range(0, n_seen, block_size):
                    block = blocks[b * n_blocks + first // block_size]
                    place = number_size * (block * block_stride + h * head_stride)
                    sizes = bf16_at(key_scales + 2 * (block * n_kv_heads + h) * block_size)
                    for t in range(min(block_size, n_seen - first)):
                        key = numbers_at(keys + place + number_size * t * width)
                        size = factor * widened(sizes[t]) if scaled else factor
                        for g in range(group):
                            score = np.float32(0)
                            for c in range(width):
                                score += wide(key[c]) * query[g * width + c]
                            score = _capped(score * size, bound)
                            scores[g * longest + first + t] = score
                            largest[g] = max(largest[g], score)
                for g in range(group):
                    # From here on, the reciprocal of the sum.
                    largest[g] = np.float32(1) / _exponentials(scores, g * longest, n_seen, largest[g])
                    for c in range(width):
                        result[g * width + c] = np.float32(0)
                for first in range(0, n_seen, block_size):
                    block = blocks[b * n_blocks + first // block_size]
                    place = number_size * (block * block_stride + h * head_stride)
                    sizes = bf16_at(value_scales + 2 * (block * n_kv_heads + h) * block_size)
                    for t in range(min(block_size, n_seen - first)):
                        value = numbers_at(values + place + number_size * t * width)
                        size = widened(sizes[t]) if scaled else np.float32(1)
                        for g in range(group):
                            weight = scores[g * longest + first + t] * largest[g] * size
                            for c in range(width):
                                result[g * width + c] += weight * wide(value[c])

    return attend


@jitted_with(fastmath=FASTMATH, inline="always")
def _capped(score, cap):
    """cap · tanh(score / cap), with e^x of what is not above 0 alone; the score itself if cap is 0."""
    if cap > 0:
        small = exponential(-abs(score) * np.float32(2) / cap)
        bounded = cap * (np.float32(1) - small) / (np.float32(1) + small)
        return bounded if score > 0 else -bounded
    return score


@jitted_with(fastmath=FASTMATH, inline="always")
def _exponentials(scores, start, n, largest):
    """Make n scores from `start` on e^(score - largest); their sum."""
    total = np.float32(0)
    for t in range(start, start + n):
        e = exponential(scores[t] - largest)
        scores[t] = e
        total += e
    return total


@jitted_with(fastmath=FASTMATH, inline="always")
def _as_float32(number):
    return np.float32(number)


_BF16, _FLOAT32 = _attention(2, bf16_at, widened, False), _attention(4, f32_at, _as_float32, False)
attend_bf16 = CompiledFunction(_BF16, name="attend_bf16", fastmath=FASTMATH)
attend_float32 = CompiledFunction(_FLOAT32, name="attend_float32", fastmath=FASTMATH)
attend_int8 = CompiledFunction(_attention(1, i8_at, _as_float32, True), name="attend_int8", fastmath=FASTMATH)
attend_to_bf16, attend_to_float32 = (jitted_with(fastmath=FASTMATH)(each) for each in (_BF16, _FLOAT32))
"""The loops of `attend_bf16` and `attend_float32`, for compiled functions."""
