"""The Triton kernels of one block's decoding step: products of a few vectors with some rows of a matrix, with what
stands before and behind them.

A program holds all vectors, and reads each of its rows once. It adds up two products side by side, of rows that are
needed together: a gate and what it multiplies, or two numbers of a head that are rotated as a pair. The norm before
them is computed in two passes over the vectors, rounded as the norm alone would be.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.attention.triton_decode import joined
from napkin.kernels.attention.triton_flash import tanh
from napkin.kernels.pointwise.triton_pointwise import GELU_CUBIC, GELU_SCALE
from napkin.kernels.triton_tiles import dot_precision

_ROWS = 16
"""Rows of a program: a small model's matrix, too, is divided among all multiprocessors."""
_JOINED = 8
"""Sequences times splits up to which each program of the product joins the splits itself: each reads them again."""
ACTIVATIONS = ("relu", "relu_squared", "gelu", "gelu_tanh", "silu", "sigmoid")


def _vectors(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _columns(dtype: torch.dtype, rows: int, vectors: int) -> int:
    """Columns that are multiplied at a time in the format of the vectors: 16 KiB of a program's rows at most. Products
    in fp32 hold what they multiply in registers."""
    most = 128 if dtype.itemsize == 2 else 64 if vectors == 16 else 32
    return max(16, min(most, 16384 // (rows * dtype.itemsize)))


def project_heads(
    x: Tensor,
    matrix: list[Tensor],
    bias: Tensor | None,
    factor: float,
    gain: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    centred: bool,
    n_heads: int,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    head_eps: float,
    cosines: Tensor | None,
    sines: Tensor | None,
    interleaved: bool,
    blocks: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> Tensor:
    """See `napkin.kernels.decoding.block_step.project_heads`."""
    n_vectors, n_columns = x.shape
    n_kv_heads, block_size, width = keys.shape[1:]
    half = (width + 1) // 2
    # A norm of a head, or its scale, needs all of its numbers.
    whole = query_gain is not None or key_scales is not None
    pairs = max(16, triton.next_power_of_2(half)) if whole else _ROWS
    queries = x.new_empty(n_vectors, n_heads, 1, width)
    heads_kernel[(n_heads + 2 * n_kv_heads, triton.cdiv(half, pairs))](
        x, matrix[0], matrix[-1], bias, factor, gain, norm_bias, eps, query_gain, key_gain, head_eps, cosines, sines,
        blocks, slots, keys, values, key_scales, value_scales, queries, n_vectors, n_columns, x.stride(0), n_heads,
        n_kv_heads, block_size, *keys.stride()[:3], *values.stride()[:3],
        HEAD=width, INT8=len(matrix) > 1, BIASED=bias is not None, CENTRED=centred, SHIFTED=norm_bias is not None,
        HEAD_NORMED=query_gain is not None, ROTATED=cosines is not None, INTERLEAVED=interleaved,
        QUANTIZED=key_scales is not None, VECTORS=_vectors(n_vectors), PAIRS=pairs,
        COLUMNS=_columns(x.dtype, 2 * pairs, _vectors(n_vectors)), PRECISION=dot_precision(x.dtype),
        # Warps of NVIDIA's have 32 threads, those of AMD's 64.
        num_warps=8 if torch.version.hip is None and _vectors(n_vectors) * pairs * x.element_size() >= 8192 else 4,
        num_stages=3,
    )  # fmt: skip
    return queries


def project_activation(
    x: Tensor,
    matrix: list[Tensor],
    bias: Tensor | None,
    factor: float,
    gain: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    centred: bool,
    activation: str,
    gated: bool,
) -> Tensor:
    """See `napkin.kernels.decoding.block_step.project_activation`."""
    n_vectors, n_columns = x.shape
    n_rows = len(matrix[0]) // (2 if gated else 1)
    result = x.new_empty(n_vectors, n_rows)
    activation_kernel[(triton.cdiv(n_rows, _ROWS),)](
        x, matrix[0], matrix[-1], bias, factor, gain, norm_bias, eps, result, n_vectors, n_rows, n_columns, x.stride(0),
        INT8=len(matrix) > 1, BIASED=bias is not None, CENTRED=centred, SHIFTED=norm_bias is not None,
        ACTIVATION=ACTIVATIONS.index(activation), GATED=gated, VECTORS=_vectors(n_vectors), ROWS=_ROWS,
        COLUMNS=_columns(x.dtype, 2 * _ROWS, _vectors(n_vectors)), PRECISION=dot_precision(x.dtype),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return result


def add_product(
    x: Tensor, logsumexp: Tensor | None, matrix: list[Tensor], bias: Tensor | None, factor: float, residual: Tensor
) -> Tensor:
    """See `napkin.kernels.decoding.block_step.add_product`."""
    n_vectors, n_heads, splits, width = x.shape
    if logsumexp is not None and splits > 1 and n_vectors * splits > _JOINED:
        x, splits = joined(x, logsumexp, residual.dtype), 1
    n_rows = len(matrix[0])
    result = torch.empty_like(residual)
    columns = (
        _columns(residual.dtype, _ROWS, _vectors(n_vectors)) if splits == 1 else max(16, triton.next_power_of_2(width))
    )
    sum_kernel[(triton.cdiv(n_rows, _ROWS),)](
        x, logsumexp, matrix[0], matrix[-1], bias, factor, residual, result, n_vectors, n_rows, n_heads, splits,
        residual.stride(0),
        HEAD=width if splits > 1 else n_heads * width, SPLITS=triton.next_power_of_2(splits), INT8=len(matrix) > 1,
        BIASED=bias is not None, VECTORS=_vectors(n_vectors), ROWS=_ROWS, COLUMNS=columns,
        PRECISION=dot_precision(residual.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
    return result


@triton.jit
@no_type_check
def moments(
    x, x_row, vectors, in_x, n_columns, eps, CENTRED: tl.constexpr, VECTORS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The mean of each vector (0 for RMSNorm), and 1 over the root of its mean square around it."""
    mean = tl.zeros((VECTORS,), dtype=tl.float32)
    if CENTRED:
        sums = tl.zeros((VECTORS, COLUMNS), dtype=tl.float32)
        for start in range(0, n_columns, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = in_x[:, None] & (columns < n_columns)[None, :]
            sums += tl.load(x + vectors[:, None] * x_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 1) / n_columns
    squares = tl.zeros((VECTORS, COLUMNS), dtype=tl.float32)
    for start in range(0, n_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = in_x[:, None] & (columns < n_columns)[None, :]
        s = tl.load(x + vectors[:, None] * x_row + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        s = tl.where(inside, s - mean[:, None], 0.0)
        squares += s * s
    return mean, 1.0 / tl.sqrt(tl.sum(squares, 1) / n_columns + eps)


@triton.jit
@no_type_check
def read_rows(weight, rows, in_rows, columns, n_columns):
    """Some columns of some rows of a matrix."""
    at = weight + tl.cast(rows, tl.int64)[:, None] * n_columns + columns[None, :]
    return tl.load(at, mask=in_rows[:, None] & (columns < n_columns)[None, :], other=0)


@triton.jit
@no_type_check
def scaled(sums, scales, bias, factor, rows, in_rows, INT8: tl.constexpr, BIASED: tl.constexpr):
    """Products with the rows of a matrix times their scales and a factor, with a bias."""
    if INT8:
        sums *= tl.load(scales + rows, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    sums *= factor
    if BIASED:
        sums += tl.load(bias + rows, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
@no_type_check
def normed_products(
    x, x_row, n_vectors, n_columns, gain, shift, eps, weight, first_rows, in_first, second_rows, in_second,
    CENTRED: tl.constexpr, SHIFTED: tl.constexpr, TWO: tl.constexpr, VECTORS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of normed vectors with two blocks of rows: [vector, row] each."""
    vectors = tl.arange(0, VECTORS)
    in_x = vectors < n_vectors
    mean, inverse = moments(x, x_row, vectors, in_x, n_columns, eps, CENTRED, VECTORS, COLUMNS)
    first = tl.zeros((VECTORS, ROWS), dtype=tl.float32)
    second = tl.zeros((VECTORS, ROWS), dtype=tl.float32)
    for start in range(0, n_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = in_x[:, None] & (columns < n_columns)[None, :]
        part = tl.load(x + vectors[:, None] * x_row + columns[None, :], mask=inside, other=0.0)
        factors = tl.load(gain + columns, mask=columns < n_columns, other=0.0).to(tl.float32)
        normed = (part.to(tl.float32) - mean[:, None]) * inverse[:, None] * factors[None, :]
        if SHIFTED:
            normed += tl.load(shift + columns, mask=columns < n_columns, other=0.0).to(tl.float32)[None, :]
        normed = normed.to(part.dtype)
        rows = read_rows(weight, first_rows, in_first, columns, n_columns).to(part.dtype)
        first = tl.dot(normed, tl.trans(rows), first, input_precision=PRECISION)
        if TWO:
            rows = read_rows(weight, second_rows, in_second, columns, n_columns).to(part.dtype)
            second = tl.dot(normed, tl.trans(rows), second, input_precision=PRECISION)
    return first, second


@triton.jit
@no_type_check
def heads_kernel(
    x, weight, weight_scales, bias, factor, gain, shift, eps, query_gain, key_gain, head_eps, cosines, sines,
    blocks, slots, keys, values, key_scales, value_scales, queries, n_vectors, n_columns, x_row, n_heads,
    n_kv_heads, block_size, k_block, k_head, k_slot, v_block, v_head, v_slot,
    HEAD: tl.constexpr, INT8: tl.constexpr, BIASED: tl.constexpr, CENTRED: tl.constexpr, SHIFTED: tl.constexpr,
    HEAD_NORMED: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, QUANTIZED: tl.constexpr,
    VECTORS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some pairs of numbers of one head, which are rotated together: grid [query, key and value heads, parts]."""
    head = tl.program_id(0)
    pairs = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    half: tl.constexpr = (HEAD + 1) // 2
    lower, upper = pairs, half + pairs
    if INTERLEAVED:
        lower, upper = 2 * pairs, 2 * pairs + 1
    in_lower = pairs < half
    in_upper = in_lower & (upper < HEAD)
    a, b = normed_products(
        x, x_row, n_vectors, n_columns, gain, shift, eps, weight, head * HEAD + lower, in_lower,
        head * HEAD + upper, in_upper, CENTRED, SHIFTED, True, VECTORS, PAIRS, COLUMNS, PRECISION,
    )  # fmt: skip
    a = scaled(a, weight_scales, bias, factor, head * HEAD + lower, in_lower, INT8, BIASED)
    b = scaled(b, weight_scales, bias, factor, head * HEAD + upper, in_upper, INT8, BIASED)
    vectors = tl.arange(0, VECTORS)
    in_x = vectors < n_vectors
    compared = head < n_heads + n_kv_heads
    if HEAD_NORMED:
        inverse = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD + head_eps)[:, None]
        of_query = head < n_heads
        gain_a = tl.load(query_gain + lower, mask=in_lower & of_query, other=0.0).to(tl.float32)
        gain_a += tl.load(key_gain + lower, mask=in_lower & (head >= n_heads), other=0.0).to(tl.float32)
        gain_b = tl.load(query_gain + upper, mask=in_upper & of_query, other=0.0).to(tl.float32)
        gain_b += tl.load(key_gain + upper, mask=in_upper & (head >= n_heads), other=0.0).to(tl.float32)
        a = tl.where(compared, a * inverse * gain_a[None, :], a)
        b = tl.where(compared, b * inverse * gain_b[None, :], b)
    at_lower, in_a = vectors[:, None] * HEAD + lower[None, :], in_x[:, None] & in_lower[None, :]
    at_upper, in_b = vectors[:, None] * HEAD + upper[None, :], in_x[:, None] & in_upper[None, :]
    if ROTATED:
        turned_a = a * tl.load(cosines + at_lower, mask=in_a, other=0.0).to(tl.float32)
        turned_a += b * tl.load(sines + at_lower, mask=in_a, other=0.0).to(tl.float32)
        turned_b = b * tl.load(cosines + at_upper, mask=in_b, other=0.0).to(tl.float32)
        turned_b += a * tl.load(sines + at_upper, mask=in_b, other=0.0).to(tl.float32)
        a = tl.where(compared, turned_a, a)
        b = tl.where(compared, turned_b, b)
    a, b = a.to(queries.dtype.element_ty), b.to(queries.dtype.element_ty)
    block = tl.load(blocks + vectors, mask=in_x, other=0).to(tl.int64)
    slot = tl.load(slots + vectors, mask=in_x, other=0).to(tl.int64)
    if head < n_heads:
        row = ((vectors * n_heads + head) * HEAD)[:, None]
        tl.store(queries + row + lower[None, :], a, mask=in_a)
        tl.store(queries + row + upper[None, :], b, mask=in_b)
    elif compared:
        kv_head = head - n_heads
        base = keys + (block * k_block + kv_head * k_head + slot * k_slot)[:, None]
        place = (block * n_kv_heads + kv_head) * block_size + slot
        put(base, key_scales, place, a, b, lower, upper, in_a, in_b, in_x, QUANTIZED)
    else:
        kv_head = head - n_heads - n_kv_heads
        base = values + (block * v_block + kv_head * v_head + slot * v_slot)[:, None]
        place = (block * n_kv_heads + kv_head) * block_size + slot
        put(base, value_scales, place, a, b, lower, upper, in_a, in_b, in_x, QUANTIZED)


@triton.jit
@no_type_check
def put(base, scales, place, a, b, lower, upper, in_a, in_b, in_x, QUANTIZED: tl.constexpr):
    """Keep the numbers of a head in its slots, in int8 with a scale."""
    if QUANTIZED:
        a, b = a.to(tl.float32), b.to(tl.float32)
        largest = tl.maximum(tl.max(tl.where(in_a, tl.abs(a), 0.0), 1), tl.max(tl.where(in_b, tl.abs(b), 0.0), 1))
        factor = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)).to(scales.dtype.element_ty)
        tl.store(scales + place, factor, mask=in_x)
        divisor = tl.maximum(factor.to(tl.float32), 1.1754943508222875e-38)[:, None]
        a, b = whole_number(tl.div_rn(a, divisor)), whole_number(tl.div_rn(b, divisor))
    tl.store(base + lower[None, :], a.to(base.dtype.element_ty), mask=in_a)
    tl.store(base + upper[None, :], b.to(base.dtype.element_ty), mask=in_b)


@triton.jit
@no_type_check
def whole_number(x):
    """The nearest integer from -127 to 127, of two the even one: numbers of 2**23 and more have no fraction."""
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return (x + 12582912.0) - 12582912.0


@triton.jit
@no_type_check
def activated(z, ACTIVATION: tl.constexpr):
    """The activation with this index in ACTIVATIONS."""
    y = tl.sigmoid(z)
    if ACTIVATION == 0:
        y = tl.maximum(z, 0.0)
    elif ACTIVATION == 1:
        y = tl.maximum(z, 0.0) * tl.maximum(z, 0.0)
    elif ACTIVATION == 2:
        y = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == 3:
        y = 0.5 * z * (1.0 + tanh((z + z * z * z * GELU_CUBIC) * GELU_SCALE))
    elif ACTIVATION == 4:
        y *= z
    return y


@triton.jit
@no_type_check
def activation_kernel(
    x, weight, weight_scales, bias, factor, gain, shift, eps, result, n_vectors, n_rows, n_columns, x_row,
    INT8: tl.constexpr, BIASED: tl.constexpr, CENTRED: tl.constexpr, SHIFTED: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, VECTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some numbers between the matrices of a feed-forward layer: grid [blocks of rows]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < n_rows
    inner, other = normed_products(
        x, x_row, n_vectors, n_columns, gain, shift, eps, weight, rows, in_rows, n_rows + rows, in_rows,
        CENTRED, SHIFTED, GATED, VECTORS, ROWS, COLUMNS, PRECISION,
    )  # fmt: skip
    inner = activated(scaled(inner, weight_scales, bias, factor, rows, in_rows, INT8, BIASED), ACTIVATION)
    if GATED:
        inner *= scaled(other, weight_scales, bias, factor, n_rows + rows, in_rows, INT8, BIASED)
    vectors = tl.arange(0, VECTORS)
    at = result + vectors[:, None] * n_rows + rows[None, :]
    tl.store(at, inner.to(result.dtype.element_ty), mask=(vectors < n_vectors)[:, None] & in_rows[None, :])


@triton.jit
@no_type_check
def sum_kernel(
    x, logsumexp, weight, weight_scales, bias, factor, residual, result, n_vectors, n_rows, n_heads, splits,
    residual_row, HEAD: tl.constexpr, SPLITS: tl.constexpr, INT8: tl.constexpr, BIASED: tl.constexpr,
    VECTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some numbers of the residual stream: grid [blocks of rows]. With one split HEAD is the whole vector."""
    rows, vectors = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, VECTORS)
    in_rows, in_x = rows < n_rows, vectors < n_vectors
    inside = in_x[:, None] & in_rows[None, :]
    sums = tl.zeros((VECTORS, ROWS), dtype=tl.float32)
    dtype = result.dtype.element_ty
    if SPLITS == 1:
        for start in range(0, HEAD, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            at = x + vectors[:, None] * HEAD + columns[None, :]
            part = tl.load(at, mask=in_x[:, None] & (columns < HEAD)[None, :], other=0.0).to(dtype)
            part_rows = read_rows(weight, rows, in_rows, columns, HEAD).to(dtype)
            sums = tl.dot(part, tl.trans(part_rows), sums, input_precision=PRECISION)
    else:
        all_splits = tl.arange(0, SPLITS)
        for head in range(0, n_heads):
            row = (vectors * n_heads + head) * splits
            present = in_x[:, None] & (all_splits < splits)[None, :]
            logs = tl.load(logsumexp + row[:, None] + all_splits[None, :], mask=present, other=float("-inf"))
            # A vector that is not there has no split.
            largest = tl.where(in_x, tl.max(logs, 1), 0.0)
            total = tl.where(in_x, tl.sum(tl.exp2(logs - largest[:, None]), 1), 1.0)
            numbers = tl.arange(0, COLUMNS)
            here = in_x[:, None] & (numbers < HEAD)[None, :]
            mixed = tl.zeros((VECTORS, COLUMNS), dtype=tl.float32)
            for split in range(0, splits):
                log = tl.load(logsumexp + row + split, mask=in_x, other=float("-inf"))
                at = x + ((row + split) * HEAD)[:, None] + numbers[None, :]
                part = tl.load(at, mask=here, other=0.0).to(tl.float32)
                mixed += part * tl.exp2(log - largest)[:, None]
            mixed = (mixed / total[:, None]).to(dtype)
            at = weight + tl.cast(rows, tl.int64)[:, None] * (n_heads * HEAD) + head * HEAD + numbers[None, :]
            part_rows = tl.load(at, mask=in_rows[:, None] & (numbers < HEAD)[None, :], other=0).to(dtype)
            sums = tl.dot(mixed, tl.trans(part_rows), sums, input_precision=PRECISION)
    sums = scaled(sums, weight_scales, bias, factor, rows, in_rows, INT8, BIASED)
    kept = tl.load(residual + vectors[:, None] * residual_row + rows[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(result + vectors[:, None] * n_rows + rows[None, :], (kept + sums).to(dtype), mask=inside)
