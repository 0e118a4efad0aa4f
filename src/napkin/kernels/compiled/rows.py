"""Rows of numbers between memory, in bf16 or float32, and a float32 buffer that stays in the processor's cache.

A kernel widens a row into its buffer, computes there, and narrows the result back: one loop for both formats. The
buffers belong to the thread that calls.
"""

from typing import Any

import numpy as np

from napkin.kernels.compiled.number_conversions import FASTMATH, bf16_at, exponential, larger, narrowed, widened
from napkin.machine_code.compiled_function import jitted_with
from napkin.machine_code.pointers import f32_at


@jitted_with(fastmath=FASTMATH)
def widen_row(address: Any, is_bf16: Any, start: Any, n: Any, row: Any) -> None:
    """row[0:n] = the n numbers from `start` on."""
    if is_bf16:
        narrow = bf16_at(address)
        for j in range(n):
            row[j] = widened(narrow[start + j])
    else:
        wide = f32_at(address)
        for j in range(n):
            row[j] = wide[start + j]


@jitted_with(fastmath=FASTMATH)
def narrow_row(row: Any, address: Any, is_bf16: Any, start: Any, n: Any) -> None:
    """The n numbers from `start` on = row[0:n]."""
    if is_bf16:
        narrow = bf16_at(address)
        for j in range(n):
            narrow[start + j] = narrowed(row[j])
    else:
        wide = f32_at(address)
        for j in range(n):
            wide[start + j] = row[j]


@jitted_with(fastmath=FASTMATH)
def zero_row(address: Any, is_bf16: Any, start: Any, n: Any) -> None:
    """The n numbers from `start` on = 0."""
    if is_bf16:
        narrow = bf16_at(address)
        for j in range(n):
            narrow[start + j] = np.uint16(0)
    else:
        wide = f32_at(address)
        for j in range(n):
            wide[start + j] = np.float32(0)


@jitted_with(fastmath=FASTMATH)
def exponentiate_row(row: Any, n: Any) -> Any:
    """row[0:n] = e^(row - its largest); the largest, and the sum of the exponentials."""
    largest = np.float32(-np.inf)
    for j in range(n):
        largest = larger(largest, row[j])
    total = np.float32(0)
    for j in range(n):
        e = exponential(row[j] - largest)
        row[j] = e
        total += e
    return largest, total
