"""The n-grams of a text, compiled: the same rows in the same order as `ngram_rows` in classifier.py."""

from typing import Any

import numpy as np

from napkin.machine_code.compiled_function import jitted
from napkin.machine_code.pointers import u8_at, u32_at

# As in classifier.py; they stand here too because the key of the cached machine code is made of this folder's sources.
LONGEST_NGRAM = 4
LONGEST_WORD = 64
MOST_ROWS = LONGEST_NGRAM * (LONGEST_WORD + 2) + 1
"""Most rows that one word has."""
_SEED = np.uint64(0x9E3779B97F4A7C15)
_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_SPACE = np.uint64(0x20)


@jitted
def next_word(points: Any, is_letter: Any, start: Any, stop: Any) -> Any:
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
def add_rows_of_word(points: Any, start: Any, end: Any, shift: Any, rows: Any, n_rows: Any) -> Any:
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
