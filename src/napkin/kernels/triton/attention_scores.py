"""What the forward and the backward kernels of attention have in common: scores, and which of them count.

Scores are kept in units of log 2, as the exponential of base 2 is one instruction: exp(x) = 2^(x · log2 e).
"""

# pyright: reportMissingImports=false

from typing import no_type_check

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def tanh(x):
    """Of both signs from the exponential of -2|x|, which cannot overflow."""
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit
@no_type_check
def is_seen(positions, columns, first, n_keys, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """Which pairs count: queries at `positions`, whose first keys are `first`, and the keys in `columns`; broadcast."""
    seen = columns < n_keys
    if CAUSAL:
        seen = seen & (columns <= positions)
    if BOUNDED:
        seen = seen & (columns >= first)
    return seen


@triton.jit
@no_type_check
def first_keys(starts, positions, n_keys, window, WINDOWED: tl.constexpr, PACKED: tl.constexpr):
    """The first key that the query at each position sees, by window and document."""
    first = positions * 0
    if WINDOWED:
        first = tl.maximum(first, positions - window + 1)
    if PACKED:
        first = tl.maximum(first, tl.load(starts + positions, mask=positions < n_keys, other=0))
    return first


@triton.jit
@no_type_check
def load_rows(base, start, row_stride, n_rows, HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows start .. start + BLOCK of a matrix, [BLOCK, WIDTH]; zeros beyond its end and beyond HEAD columns.

    The start is multiplied in 64 bits: a sequence may hold more than 2^31 numbers.
    """
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    base += tl.cast(start, tl.int64) * row_stride
    inside = (rows < n_rows - start)[:, None]
    if HEAD != WIDTH:
        inside = inside & (columns < HEAD)[None, :]
    return tl.load(base + rows[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
@no_type_check
def store_rows(base, numbers, start, row_stride, n_rows, HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The counterpart of `load_rows`, in the matrix's dtype."""
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    base += tl.cast(start, tl.int64) * row_stride
    inside = (rows < n_rows - start)[:, None]
    if HEAD != WIDTH:
        inside = inside & (columns < HEAD)[None, :]
    pointers = base + rows[:, None] * row_stride + columns[None, :]
    tl.store(pointers, numbers.to(base.dtype.element_ty), mask=inside)
