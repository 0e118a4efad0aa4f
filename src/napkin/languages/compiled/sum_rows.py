"""The sum of the rows of a text's n-grams and the logits, compiled, in one pass over its code points."""

import math
from typing import Any

import numpy as np

from napkin.languages.compiled.scan_ngrams import MOST_ROWS, add_rows_of_word, next_word
from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import f32_at, i8_at, i32_at, i64_at, u32_at

_WIDTH = 16
_ROOM = 4096
"""Rows that are collected before they are summed: 4096 · 127 is far below 2^31."""
SCRATCH_BYTES = 4 * _ROOM + 4 * _WIDTH


@CompiledFunction
def sum_rows(points: Any, n_points: Any, is_letter: Any, weights: Any, row_bits: Any, scratch: Any, sums: Any) -> Any:
    """Add the rows of all n-grams to `sums`; returns how many n-grams there are.

    `points` are uint32 [n_points], `is_letter` uint8 [1114112], `weights` int8 [2^row_bits, 16], `sums` int64 [16];
    `scratch` has SCRATCH_BYTES.
    """
    return _sum(points, n_points, is_letter, weights, row_bits, scratch, sums)


@CompiledFunction
def score(
    points: Any, n_points: Any, is_letter: Any, weights: Any, row_bits: Any, outputs: Any, n_labels: Any, work: Any
) -> Any:
    """Write the logits of a text; returns how many n-grams it has.

    Beside what `sum_rows` takes: `outputs` float32 [n_labels + 1, 17], whose last row begins with the sharpness;
    `work` has the logits, float32 [n_labels, rounded up to even], then int64 [16] of zeros, then SCRATCH_BYTES.
    """
    sums = work + 8 * ((n_labels + 1) // 2)
    n_ngrams = _sum(points, n_points, is_letter, weights, row_bits, sums + 8 * _WIDTH, sums)
    if n_ngrams > 0:
        total, logits = i64_at(sums), f32_at(work)
        sharpness = f32_at(outputs + 4 * (_WIDTH + 1) * n_labels)
        sharp = math.exp(sharpness[0] + sharpness[1] * math.log(n_ngrams))
        for label in range(n_labels):
            row = f32_at(outputs + 4 * (_WIDTH + 1) * label)
            result = 0.0
            for j in range(_WIDTH):
                result += row[j] * total[j]
            logits[label] = np.float32(sharp * (result / n_ngrams + row[_WIDTH]))
    return n_ngrams


@jitted
def _sum(points: Any, n_points: Any, is_letter: Any, weights: Any, row_bits: Any, scratch: Any, sums: Any) -> Any:
    start, total, n_rows = 0, 0, 0
    while start < n_points:
        start, end = next_word(points, is_letter, start, n_points)
        if end > start:
            n_rows = add_rows_of_word(points, start, end, 64 - row_bits, scratch, n_rows)
        start = end
        if n_rows > _ROOM - MOST_ROWS or start == n_points:
            _add(weights, scratch, n_rows, scratch + 4 * _ROOM, sums)
            total += n_rows
            n_rows = 0
    return total


@jitted
def _add(weights: Any, rows: Any, n_rows: Any, partial: Any, sums: Any) -> None:
    """sums += the rows, which are added in int32 first."""
    rows, partial, sums = u32_at(rows), i32_at(partial), i64_at(sums)
    for j in range(_WIDTH):
        partial[j] = np.int32(0)
    for i in range(n_rows):
        row = i8_at(weights + _WIDTH * np.int64(rows[i]))
        for j in range(_WIDTH):
            partial[j] += np.int32(row[j])
    for j in range(_WIDTH):
        sums[j] += np.int64(partial[j])
