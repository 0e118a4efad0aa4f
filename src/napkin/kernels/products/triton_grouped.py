"""Products of the rows of each group with the group's own matrix, in one launch: nothing waits for the group sizes.

How many blocks of rows a group has is known on the device only: there are as many programs as could be needed, one for
each full block and one more for each group, and each looks up its group in `starts`.
"""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.triton_tiles import PRODUCT, ProductTile, dot_precision, tuned


def grouped_matmul(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """See `napkin.kernels.products.grouped.grouped_matmul_reference`."""
    (rows, depth), (groups, columns, _) = x.shape, weight.shape
    result = x.new_empty(rows, columns)
    if result.numel():
        tile = tuned("grouped product", PRODUCT, x, depth)
        matmul_kernel[(triton.cdiv(rows, tile.rows) + groups, triton.cdiv(columns, tile.columns))](
            x, weight, starts, result, rows, columns, depth, groups, *x.stride(), *weight.stride(),
            PRECISION=dot_precision(x.dtype), **_sizes(tile),
        )  # fmt: skip
    return result


def grouped_outer(left: Tensor, right: Tensor, starts: Tensor) -> Tensor:
    """leftᵀ · right for the rows of each group: [groups, columns of left, columns of right]; 0 for an empty group."""
    (rows, wide), columns, groups = left.shape, right.shape[1], len(starts)
    result = left.new_empty(groups, wide, columns)
    if result.numel():
        tile = tuned("grouped outer product", PRODUCT, left, wide)
        outer_kernel[(groups, triton.cdiv(wide, tile.rows), triton.cdiv(columns, tile.columns))](
            left, right, starts, result, rows, wide, columns, groups, *left.stride(), *right.stride(),
            PRECISION=dot_precision(left.dtype), **_sizes(tile),
        )  # fmt: skip
    return result


def _sizes(tile: ProductTile) -> dict[str, int]:
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    return {**sizes, "num_warps": tile.warps, "num_stages": tile.stages}


@triton.jit
@no_type_check
def matmul_kernel(
    x, weight, starts, result, n_rows, n_columns, depth, groups, x_row, x_column, w_group, w_column, w_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of the result: grid [blocks of rows, blocks of columns]."""
    tile = tl.cast(tl.program_id(0), tl.int64)
    group, first, end, done = tile * 0, tile * 0, tile * 0, tile * 0
    for candidate in range(0, groups):
        begin = tl.cast(tl.load(starts + candidate), tl.int64)
        stop = tl.cast(tl.load(starts + candidate + 1, mask=candidate + 1 < groups, other=n_rows), tl.int64)
        tiles = (stop - begin + ROWS - 1) // ROWS
        here = (tile >= done) & (tile < done + tiles)
        group = tl.where(here, candidate, group)
        first = tl.where(here, begin + (tile - done) * ROWS, first)
        end = tl.where(here, stop, end)
        done += tiles
    # A program beyond the last block has no rows: its end is 0.
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight += group * w_group
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        left = tl.load(
            x + rows[:, None] * x_row + inner[None, :] * x_column,
            mask=(rows < end)[:, None] & (inner < depth)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            weight + tl.cast(columns, tl.int64)[None, :] * w_column + inner[:, None] * w_depth,
            mask=(columns < n_columns)[None, :] & (inner < depth)[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision=PRECISION)
    at = result + rows[:, None] * n_columns + columns[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=(rows < end)[:, None] & (columns < n_columns)[None, :])


@triton.jit
@no_type_check
def outer_kernel(
    left, right, starts, result, n_rows, n_wide, n_columns, groups, l_row, l_column, r_row, r_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of the result: grid [groups, blocks of left's columns, blocks of right's columns]."""
    group = tl.program_id(0)
    begin = tl.cast(tl.load(starts + group), tl.int64)
    end = tl.cast(tl.load(starts + group + 1, mask=group + 1 < groups, other=n_rows), tl.int64)
    wide = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(begin, end, DEPTH):
        rows = start + tl.arange(0, DEPTH)
        inside = rows < end
        a = tl.load(
            left + rows[None, :] * l_row + wide[:, None] * l_column,
            mask=inside[None, :] & (wide < n_wide)[:, None], other=0.0,
        )  # fmt: skip
        b = tl.load(
            right + rows[:, None] * r_row + columns[None, :] * r_column,
            mask=inside[:, None] & (columns < n_columns)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision=PRECISION)
    result += tl.cast(group, tl.int64) * n_wide * n_columns
    at = result + wide[:, None] * n_columns + columns[None, :]
    inside = (wide < n_wide)[:, None] & (columns < n_columns)[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=inside)
