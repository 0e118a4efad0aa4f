"""The n-grams of a text, the sum of their rows and the logits, compiled, in one pass over its code points.

The rows are the same in the same order as those of `ngram_rows` in classifier.py.
"""

import math

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import f32_at, i8_at, i32_at, i64_at, u8_at, u32_at

# As in classifier.py; they stand here too because the key of the cached machine code is made of this folder's sources.
LONGEST_NGRAM = 4
LONGEST_WORD = 64
MOST_ROWS = LONGEST_NGRAM * (LONGEST_WORD + 2) + 1
"""Most rows that one word has."""
_SEED = np.uint64(0x9E3779B97F4A7C15)
_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_SPACE = np.uint64(0x20)


@jitted
def next_word(points, is_letter, start, stop):
    """Begin and end of the next word at `start` or later; (stop, stop) if there is none."""
    points, is_letter = u32_at(points), u8_at(is_letter)
    while start < stop and is_letter[points[start]] == 0:
        start += 1
    end = start
    stop = min(stop, start + LONGEST_WORD)
    while end < stop and is_letter[points[end]] != 0:
        end += 1
    return start, end


@jitted
def add_rows_of_word(points, start, end, shift, rows, n_rows):
    """Write the rows of the word points[start:end] to rows[n_rows:]; returns the new number of rows."""
    points, rows, shift = u32_at(points), u32_at(rows), np.uint64(shift)
    for first in range(start - 1, end + 1):
        last = end if first < start else min(first + LONGEST_NGRAM - 1, end)
        hashed = _SEED
        for position in range(first, last + 1):
            inside = start <= position < end
            point = np.uint64(points[position]) if inside else _SPACE
            hashed = (hashed ^ point) * _FACTOR
            length = position + 1 - first
            if (length <= LONGEST_NGRAM or position == end) and (length > 1 or inside):
                rows[n_rows] = np.uint32(hashed >> shift)
                n_rows += 1
    return n_rows


_WIDTH = 16
_ROOM = 4096
"""Rows that are collected before they are summed: 4096 · 127 is far below 2^31."""
SCRATCH_BYTES = 4 * _ROOM + 4 * _WIDTH


@CompiledFunction
def sum_rows(points, n_points, is_letter, weights, row_bits, scratch, sums):
    """Add the rows of all n-grams to `sums`; returns how many n-grams there are.

    `points` are uint32 [n_points], `is_letter` uint8 [1114112], `weights` int8 [2^row_bits, 16], `sums` int64 [16];
    `scratch` has SCRATCH_BYTES.
    """
    return _sum(points, n_points, is_letter, weights, row_bits, scratch, sums)


@CompiledFunction
def score(points, n_points, is_letter, weights, row_bits, outputs, n_labels, work):
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
def _sum(points, n_points, is_letter, weights, row_bits, scratch, sums):
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
def _add(weights, rows, n_rows, partial, sums):
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
