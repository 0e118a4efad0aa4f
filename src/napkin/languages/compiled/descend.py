"""Training the classifier, compiled: one example after another, so that the result is the same each time."""

import math

import numpy as np

from napkin.languages.compiled.sum_rows import MOST_ROWS, add_rows_of_word, next_word
from napkin.machine_code.compiled_function import CompiledFunction, jitted_with
from napkin.machine_code.pointers import f32_at, i64_at, u32_at

_WIDTH = 16
_ROOM = 8192
"""The most rows of one example; the rest of a longer one is left out."""
_FAST = {"reassoc", "contract", "nsz"}
_EPSILON = np.float32(1e-8)
_DROPPED = np.uint64(round(0.5 * 2**32))
"""The part, of 2^32, of n-grams that each step leaves out, so that the weights do not rely on a few words."""


@CompiledFunction.with_options(fastmath=_FAST)
def descend(examples, n_examples, points, is_letter, model, n_labels, row_bits):
    """Take a step of Adagrad (Duchi et al. 2011) for each example, on the cross-entropy of its label.

    `examples` are int64 [n_examples, 3]: first and last code point, label. `model` are int64 [8], addresses of float32:
    weights [2^row_bits, 16], their sums of squares [2^row_bits], outputs [n_labels, 17], theirs [n_labels],
    scratch [8192 + n_labels + 32]; then, as bits of a float32, the rate at the first example and after the last, and
    the state of the random numbers that say what is left out, which is written back.
    """
    parts, example = i64_at(model), i64_at(examples)
    scratch = parts[4]
    rows, probability, hidden = scratch, scratch + 4 * _ROOM, scratch + 4 * (_ROOM + n_labels)
    first_rate, last_rate = f32_at(model + 40)[0], f32_at(model + 48)[0]
    state = np.uint64(parts[7])
    for i in range(n_examples):
        n_rows = _rows(points, example[3 * i], example[3 * i + 1], is_letter, 64 - row_bits, rows)
        n_rows, state = _leave_out(rows, n_rows, state)
        if n_rows == 0:
            continue
        label = example[3 * i + 2]
        rate = first_rate + (last_rate - first_rate) * np.float32(i / n_examples)
        _mean(parts[0], rows, n_rows, hidden)
        _probabilities(parts[2], hidden, n_labels, probability)
        _step(parts, rows, n_rows, hidden, probability, n_labels, label, rate)
    parts[7] = np.int64(state)


@jitted_with(fastmath=_FAST)
def _rows(points, start, stop, is_letter, shift, rows):
    n_rows = 0
    while start < stop and n_rows < _ROOM - MOST_ROWS:
        start, end = next_word(points, is_letter, start, stop)
        if end > start:
            n_rows = add_rows_of_word(points, start, end, shift, rows, n_rows)
        start = end
    return n_rows


@jitted_with(fastmath=_FAST)
def _leave_out(rows, n_rows, state):
    rows, kept = u32_at(rows), 0
    for i in range(n_rows):
        # Knuth's linear congruential generator (MMIX); its high bits are the random ones.
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        if state >> np.uint64(32) >= _DROPPED:
            rows[kept] = rows[i]
            kept += 1
    return kept, state


@jitted_with(fastmath=_FAST)
def _mean(weights, rows, n_rows, hidden):
    rows, hidden = u32_at(rows), f32_at(hidden)
    for j in range(_WIDTH):
        hidden[j] = np.float32(0)
    for i in range(n_rows):
        row = f32_at(weights + 4 * _WIDTH * np.int64(rows[i]))
        for j in range(_WIDTH):
            hidden[j] += row[j]
    share = np.float32(1 / n_rows)
    for j in range(_WIDTH):
        hidden[j] *= share


@jitted_with(fastmath=_FAST)
def _probabilities(outputs, hidden, n_labels, probability):
    """probability = the softmax of outputs · (hidden, 1)."""
    hidden, probability = f32_at(hidden), f32_at(probability)
    largest = np.float32(-np.inf)
    for k in range(n_labels):
        row = f32_at(outputs + 4 * (_WIDTH + 1) * k)
        score = row[_WIDTH]
        for j in range(_WIDTH):
            score += row[j] * hidden[j]
        probability[k] = score
        largest = max(largest, score)
    total = np.float32(0)
    for k in range(n_labels):
        probability[k] = np.float32(math.exp(probability[k] - largest))
        total += probability[k]
    for k in range(n_labels):
        probability[k] /= total


@jitted_with(fastmath=_FAST)
def _step(parts, rows, n_rows, hidden, probability, n_labels, label, rate):
    weights, squares, outputs, output_squares = parts[0], f32_at(parts[1]), parts[2], f32_at(parts[3])
    rows, backward, hidden, probability = u32_at(rows), f32_at(hidden + 4 * _WIDTH), f32_at(hidden), f32_at(probability)
    norm = np.float32(1)
    for j in range(_WIDTH):
        backward[j] = np.float32(0)
        norm += hidden[j] * hidden[j]
    for k in range(n_labels):
        error = probability[k] - np.float32(k == label)
        row = f32_at(outputs + 4 * (_WIDTH + 1) * k)
        output_squares[k] += error * error * norm / np.float32(_WIDTH + 1)
        step = rate * error / (np.float32(math.sqrt(output_squares[k])) + _EPSILON)
        for j in range(_WIDTH):
            backward[j] += error * row[j]
            row[j] -= step * hidden[j]
        row[_WIDTH] -= step
    square = np.float32(0)
    for j in range(_WIDTH):
        backward[j] /= np.float32(n_rows)
        square += backward[j] * backward[j]
    square /= np.float32(_WIDTH)
    for i in range(n_rows):
        place = np.int64(rows[i])
        squares[place] += square
        step = rate / (np.float32(math.sqrt(squares[place])) + _EPSILON)
        row = f32_at(weights + 4 * _WIDTH * place)
        for j in range(_WIDTH):
            row[j] -= step * backward[j]
