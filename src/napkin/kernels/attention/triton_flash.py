"""The kernels of FlashAttention-2 (Dao 2023), forward (algorithm 1) and backward (algorithm 2).

Forward, a program computes one block of queries. It reads the keys block by block and keeps a running maximum, a
running sum of exponentials and the values weighted so far. Blocks of keys that no query of the block sees are not read;
those that every query sees need no mask.

Backward, there are three passes without atomic additions. With weights P = exp(scores - logsumexp), upstream gradient
dO and result O, row by row:

    D = sum(dO · O),  dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P · (dP - D),  dQ = scale · dS K,  dK = scale · dSᵀ Q

The first kernel computes D. In the second a program has one block of keys and reads the queries of every head that
shares them; in the third it has one block of queries and reads the keys. P and dP are computed in both, so each number
is written once, by one program, and the gradients are the same in every run.

Scores are kept in units of log 2, as the exponential of base 2 is one instruction: exp(x) = 2^(x · log2 e).
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.triton_tiles import attention_tile, dot_precision

LOG2_E = tl.constexpr(1.4426950408889634)
_ROWS = 64


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    is_causal: bool,
    query_offset: int,
) -> tuple[Tensor, Tensor]:
    """See `napkin.kernels.attention.flash.forward_reference`."""
    batch, heads, n_queries, head_dim = query.shape
    mixed = torch.empty_like(query)
    logsumexp = query.new_empty(batch, heads, n_queries, dtype=torch.float32)
    if not query.numel():
        return mixed, logsumexp
    bounded = bounds is not None or window > 0 or softcap > 0
    tile = attention_tile("forward", query, bounded=bounded, is_causal=is_causal)
    grid = (triton.cdiv(n_queries, tile.queries) * batch * heads,)
    attend_kernel[grid](
        query,
        key,
        value,
        mixed,
        logsumexp,
        None if bounds is None else bounds[0],
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *mixed.stride()[:3],
        n_queries,
        key.shape[2],
        heads,
        heads // key.shape[1],
        scale,
        softcap,
        window,
        query_offset,
        HEAD=head_dim,
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        CAUSAL=is_causal,
        WINDOWED=window > 0,
        PACKED=bounds is not None,
        CAPPED=softcap > 0,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        PRECISION=dot_precision(query.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return mixed, logsumexp


@triton.jit
@no_type_check
def block_and_head(n_rows, BLOCK: tl.constexpr):
    """This program's block of rows, the number of blocks, and its row of [batch · heads], as int64.

    The grid has one axis: a second one ends at 65,535, which batch · heads exceeds.
    """
    blocks = tl.cdiv(n_rows, BLOCK)
    return tl.program_id(0) % blocks, blocks, tl.cast(tl.program_id(0) // blocks, tl.int64)


@triton.jit
@no_type_check
def attend_kernel(
    query, key, value, mixed, logsumexp, starts,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    n_queries, n_keys, n_heads, group, scale, softcap, window, offset,
    HEAD: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: grid [batch · heads · blocks of queries]."""
    # Late blocks see the most keys: they begin first, so that short ones fill the gaps at the end.
    block, blocks, row_of_heads = block_and_head(n_queries, BLOCK_M)
    start = (blocks - 1 - block) * BLOCK_M
    batch = row_of_heads // n_heads
    head = row_of_heads % n_heads
    query += batch * q_batch + head * q_head
    key += batch * k_batch + (head // group) * k_head
    value += batch * v_batch + (head // group) * v_head
    if PACKED:
        starts += batch * n_keys

    positions = offset + start + tl.arange(0, BLOCK_M)
    last = offset + tl.minimum(start + BLOCK_M, n_queries) - 1
    q = load_rows(query, start, q_row, n_queries, HEAD, WIDTH, BLOCK_M)
    first = first_keys(starts, positions, n_keys, window, WINDOWED, PACKED)
    mixture = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)

    # Keys begin .. whole_begin and whole_end .. end are hidden from some queries, those between from none.
    end = n_keys
    whole_end = n_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(n_keys, last + 1)
        whole_end = tl.minimum(whole_end, (offset + start + 1) // BLOCK_N * BLOCK_N)
    begin = 0
    whole_begin = 0
    if WINDOWED or PACKED:
        begin = first_keys(starts, offset + start, n_keys, window, WINDOWED, PACKED) // BLOCK_N * BLOCK_N
        whole_begin = tl.cdiv(first_keys(starts, last, n_keys, window, WINDOWED, PACKED), BLOCK_N) * BLOCK_N
        whole_begin = tl.maximum(begin, tl.minimum(whole_begin, whole_end))
        mixture, total, largest = _mix_values(
            mixture, total, largest, q, key, value, k_row, v_row, positions, first, begin, whole_begin, n_keys, scale,
            softcap, HEAD, WIDTH, CAUSAL, True, CAPPED, True, BLOCK_N, PRECISION,
        )  # fmt: skip
        whole_end = tl.maximum(whole_begin, whole_end)
    mixture, total, largest = _mix_values(
        mixture, total, largest, q, key, value, k_row, v_row, positions, first, whole_begin, whole_end, n_keys, scale,
        softcap, HEAD, WIDTH, CAUSAL, False, CAPPED, False, BLOCK_N, PRECISION,
    )  # fmt: skip
    mixture, total, largest = _mix_values(
        mixture, total, largest, q, key, value, k_row, v_row, positions, first, whole_end, end, n_keys, scale,
        softcap, HEAD, WIDTH, CAUSAL, WINDOWED or PACKED, CAPPED, True, BLOCK_N, PRECISION,
    )  # fmt: skip

    # Rows beyond the last query may have seen nothing.
    total = tl.where(total == 0, 1.0, total)
    mixed += batch * o_batch + head * o_head
    store_rows(mixed, mixture / total[:, None], start, o_row, n_queries, HEAD, WIDTH, BLOCK_M)
    rows = start + tl.arange(0, BLOCK_M)
    logsumexp += row_of_heads * n_queries
    tl.store(logsumexp + rows, (largest + tl.log2(total)) / LOG2_E, mask=rows < n_queries)


@triton.jit
@no_type_check
def _mix_values(
    mixture, total, largest, q, key, value, k_row, v_row, positions, first, begin, end, n_keys, scale, softcap,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Read the keys and values from `begin`, a multiple of BLOCK_N, to `end`."""
    for start in range(begin, end, BLOCK_N):
        k = load_rows(key, start, k_row, n_keys, HEAD, WIDTH, BLOCK_N)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if CAPPED:
            scores = softcap * tanh(scores / softcap)
        scores = scores * LOG2_E
        if MASKED:
            columns = (start + tl.arange(0, BLOCK_N))[None, :]
            seen = is_seen(positions[:, None], columns, first[:, None], n_keys, CAUSAL, BOUNDED)
            scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        shift = larger
        if MASKED:
            # A query that has seen no key yet: -inf - -inf would be NaN.
            shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(largest - shift)
        total = total * decay + tl.sum(weights, 1)
        v = load_rows(value, start, v_row, n_keys, HEAD, WIDTH, BLOCK_N)
        mixture = mixture * decay[:, None]
        mixture = tl.dot(weights.to(v.dtype), v, mixture, input_precision=PRECISION)
        largest = larger
    return mixture, total, largest


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor | None,
    mixed: Tensor,
    logsumexp: Tensor,
    scale: float,
    softcap: float,
    window: int,
    is_causal: bool,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `napkin.kernels.attention.flash.backward_reference`."""
    batch, heads, n_queries, head_dim = query.shape
    kv_heads, n_keys = key.shape[1:3]
    grad_query, grad_key, grad_value = (torch.empty_like(each) for each in (query, key, value))
    if not query.numel():
        return grad_query, grad_key.zero_(), grad_value.zero_()
    products = torch.empty_like(logsumexp)
    shape = {"HEAD": head_dim, "WIDTH": max(16, triton.next_power_of_2(head_dim))}
    product_kernel[(triton.cdiv(n_queries, _ROWS) * batch * heads,)](
        gradient, mixed, products, *gradient.stride()[:3], *mixed.stride()[:3], n_queries, heads, **shape, BLOCK=_ROWS
    )
    inputs = (query, key, value, gradient, logsumexp, products)
    starts, ends = (None, None) if bounds is None else bounds
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *gradient.stride()[:3])
    sizes = (n_queries, n_keys, heads, kv_heads, heads // kv_heads, scale, softcap, window, query_offset)
    switches = {
        "CAUSAL": is_causal,
        "WINDOWED": window > 0,
        "PACKED": bounds is not None,
        "CAPPED": softcap > 0,
        "PRECISION": dot_precision(query.dtype),
    }
    bounded = bounds is not None or window > 0 or softcap > 0
    tile = attention_tile("backward_keys", query, bounded=bounded, is_causal=is_causal)
    key_gradient_kernel[(triton.cdiv(n_keys, tile.keys) * batch * kv_heads,)](
        *inputs, grad_key, grad_value, starts, ends, *strides, *grad_key.stride()[:3], *grad_value.stride()[:3], *sizes,
        **shape, **switches, BLOCK_M=tile.queries, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile = attention_tile("backward_queries", query, bounded=bounded, is_causal=is_causal)
    query_gradient_kernel[(triton.cdiv(n_queries, tile.queries) * batch * heads,)](
        *inputs, grad_query, starts, *strides, *grad_query.stride()[:3], *sizes,
        **shape, **switches, BLOCK_M=tile.queries, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return grad_query, grad_key, grad_value


@triton.jit
@no_type_check
def product_kernel(
    gradient, mixed, products, g_batch, g_head, g_row, o_batch, o_head, o_row, n_queries, n_heads,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """D = sum(dO · O) of one block of rows: grid [batch · heads · blocks of queries]."""
    block, _, row_of_heads = block_and_head(n_queries, BLOCK)
    start = block * BLOCK
    batch = row_of_heads // n_heads
    head = row_of_heads % n_heads
    upstream = load_rows(gradient + batch * g_batch + head * g_head, start, g_row, n_queries, HEAD, WIDTH, BLOCK)
    result = load_rows(mixed + batch * o_batch + head * o_head, start, o_row, n_queries, HEAD, WIDTH, BLOCK)
    rows = start + tl.arange(0, BLOCK)
    products += row_of_heads * n_queries
    tl.store(products + rows, tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1), mask=rows < n_queries)


@triton.jit
@no_type_check
def key_gradient_kernel(
    query, key, value, gradient, logsumexp, products, grad_key, grad_value, starts, ends,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    n_queries, n_keys, n_heads, n_kv_heads, group, scale, softcap, window, offset,
    HEAD: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one head: grid [batch · kv_heads · blocks of keys]."""
    block, _, row_of_heads = block_and_head(n_keys, BLOCK_N)
    start = block * BLOCK_N
    batch = row_of_heads // n_kv_heads
    kv_head = row_of_heads % n_kv_heads
    k = load_rows(key + batch * k_batch + kv_head * k_head, start, k_row, n_keys, HEAD, WIDTH, BLOCK_N)
    v = load_rows(value + batch * v_batch + kv_head * v_head, start, v_row, n_keys, HEAD, WIDTH, BLOCK_N)
    if PACKED:
        starts += batch * n_keys
        ends += batch * n_keys

    # Every block of queries is masked: loops without a mask would need more registers than there are.
    last = tl.minimum(start + BLOCK_N, n_keys) - 1
    begin = 0
    end = n_queries
    if CAUSAL:
        begin = tl.maximum(0, start - offset) // BLOCK_M * BLOCK_M
    if WINDOWED:
        end = tl.minimum(end, last + window - offset)
    if PACKED:
        end = tl.minimum(end, tl.load(ends + last) - offset)
    dk = tl.zeros((BLOCK_N, WIDTH), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, WIDTH), dtype=tl.float32)
    for member in range(0, group):
        head = kv_head * group + member
        row = (batch * n_heads + head) * n_queries
        dk, dv = _read_queries(
            dk, dv, k, v, query + batch * q_batch + head * q_head, gradient + batch * g_batch + head * g_head,
            logsumexp + row, products + row, starts, q_row, g_row, start, begin, end,
            n_queries, n_keys, scale, softcap, window, offset,
            HEAD, WIDTH, CAUSAL, WINDOWED, PACKED, CAPPED, PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    grad_key += batch * dk_batch + kv_head * dk_head
    store_rows(grad_key, dk * scale, start, dk_row, n_keys, HEAD, WIDTH, BLOCK_N)
    grad_value += batch * dv_batch + kv_head * dv_head
    store_rows(grad_value, dv, start, dv_row, n_keys, HEAD, WIDTH, BLOCK_N)


@triton.jit
@no_type_check
def _read_queries(
    dk, dv, k, v, query, gradient, logsumexp, products, starts, q_row, g_row, key_start,
    begin, end, n_queries, n_keys, scale, softcap, window, offset,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `begin`, a multiple of BLOCK_M, to `end` have to say of a block of keys and values."""
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(query, start, q_row, n_queries, HEAD, WIDTH, BLOCK_M)
        upstream = load_rows(gradient, start, g_row, n_queries, HEAD, WIDTH, BLOCK_M)
        # Rows beyond the last query weigh exp(-inf), nothing.
        lse = tl.load(logsumexp + rows, mask=rows < n_queries, other=float("inf"))
        d = tl.load(products + rows, mask=rows < n_queries, other=0.0)
        # Transposed, [keys, queries]: the block of keys stays in registers, divided among the warps.
        weights, slope = _weights_and_slope(
            tl.dot(k, tl.trans(q), input_precision=PRECISION), lse[None, :], (rows + offset)[None, :],
            (key_start + tl.arange(0, BLOCK_N))[:, None], starts, n_keys, scale, softcap, window,
            CAUSAL, WINDOWED, PACKED, CAPPED, CAUSAL,
        )  # fmt: skip
        dv = tl.dot(weights.to(q.dtype), upstream, dv, input_precision=PRECISION)
        grad_weights = tl.dot(v, tl.trans(upstream), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - d[None, :]) * slope
        dk = tl.dot(grad_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
@no_type_check
def query_gradient_kernel(
    query, key, value, gradient, logsumexp, products, grad_query, starts,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    dq_batch, dq_head, dq_row,
    n_queries, n_keys, n_heads, n_kv_heads, group, scale, softcap, window, offset,
    HEAD: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head: grid [batch · heads · blocks of queries]."""
    block, blocks, row_of_heads = block_and_head(n_queries, BLOCK_M)
    start = (blocks - 1 - block) * BLOCK_M
    batch = row_of_heads // n_heads
    head = row_of_heads % n_heads
    query += batch * q_batch + head * q_head
    key += batch * k_batch + (head // group) * k_head
    value += batch * v_batch + (head // group) * v_head
    gradient += batch * g_batch + head * g_head
    if PACKED:
        starts += batch * n_keys
    rows = start + tl.arange(0, BLOCK_M)
    row = row_of_heads * n_queries
    q = load_rows(query, start, q_row, n_queries, HEAD, WIDTH, BLOCK_M)
    upstream = load_rows(gradient, start, g_row, n_queries, HEAD, WIDTH, BLOCK_M)
    lse = tl.load(logsumexp + row + rows, mask=rows < n_queries, other=float("inf"))
    d = tl.load(products + row + rows, mask=rows < n_queries, other=0.0)

    last = offset + tl.minimum(start + BLOCK_M, n_queries) - 1
    begin = 0
    end = n_keys
    whole_end = n_keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(n_keys, last + 1)
        whole_end = tl.minimum(whole_end, (offset + start + 1) // BLOCK_N * BLOCK_N)
    whole_begin = 0
    if WINDOWED or PACKED:
        begin = first_keys(starts, offset + start, n_keys, window, WINDOWED, PACKED) // BLOCK_N * BLOCK_N
        whole_begin = tl.cdiv(first_keys(starts, last, n_keys, window, WINDOWED, PACKED), BLOCK_N) * BLOCK_N
        whole_begin = tl.maximum(begin, tl.minimum(whole_begin, whole_end))
        whole_end = tl.maximum(whole_begin, whole_end)

    dq = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
    if WINDOWED or PACKED:
        dq = _read_keys(
            dq, q, upstream, lse, d, key, value, starts, k_row, v_row, rows + offset, begin, whole_begin, n_keys,
            scale, softcap, window, HEAD, WIDTH, CAUSAL, WINDOWED, PACKED, CAPPED, True, PRECISION, BLOCK_N,
        )  # fmt: skip
    dq = _read_keys(
        dq, q, upstream, lse, d, key, value, starts, k_row, v_row, rows + offset, whole_begin, whole_end, n_keys,
        scale, softcap, window, HEAD, WIDTH, CAUSAL, WINDOWED, PACKED, CAPPED, False, PRECISION, BLOCK_N,
    )  # fmt: skip
    dq = _read_keys(
        dq, q, upstream, lse, d, key, value, starts, k_row, v_row, rows + offset, whole_end, end, n_keys,
        scale, softcap, window, HEAD, WIDTH, CAUSAL, WINDOWED, PACKED, CAPPED, True, PRECISION, BLOCK_N,
    )  # fmt: skip
    grad_query += batch * dq_batch + head * dq_head
    store_rows(grad_query, dq * scale, start, dq_row, n_queries, HEAD, WIDTH, BLOCK_M)


@triton.jit
@no_type_check
def _read_keys(
    dq, q, upstream, lse, d, key, value, starts, k_row, v_row, positions, begin, end, n_keys, scale, softcap, window,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
    CAPPED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what the keys and values from `begin`, a multiple of BLOCK_N, to `end` have to say of a block of queries."""
    for start in range(begin, end, BLOCK_N):
        k = load_rows(key, start, k_row, n_keys, HEAD, WIDTH, BLOCK_N)
        v = load_rows(value, start, v_row, n_keys, HEAD, WIDTH, BLOCK_N)
        weights, slope = _weights_and_slope(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), lse[:, None], positions[:, None],
            (start + tl.arange(0, BLOCK_N))[None, :], starts, n_keys, scale, softcap, window,
            CAUSAL, WINDOWED, PACKED, CAPPED, MASKED,
        )  # fmt: skip
        grad_weights = tl.dot(upstream, tl.trans(v), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - d[:, None]) * slope
        dq = tl.dot(grad_scores.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
@no_type_check
def _weights_and_slope(
    scores, lse, positions, columns, starts, n_keys, scale, softcap, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """exp(scores - logsumexp), and the derivative of the soft cap, of products q · k in either orientation."""
    scores = scores * scale
    slope = 1.0
    if CAPPED:
        bounded = tanh(scores / softcap)
        slope = 1.0 - bounded * bounded
        scores = softcap * bounded
    weights = (scores - lse) * LOG2_E
    if MASKED:
        first = first_keys(starts, positions, n_keys, window, WINDOWED, PACKED)
        seen = is_seen(positions, columns, first, n_keys, CAUSAL, WINDOWED or PACKED)
        weights = tl.where(seen, weights, float("-inf"))
    return tl.exp2(weights), slope


@triton.jit
@no_type_check
def is_seen(positions, columns, first, n_keys, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """Masks of the pairs that count: queries at `positions`, whose first keys are `first`, and the keys in `columns`;
    broadcast."""
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
def tanh(x):
    """Computed from the exponential of -2|x|, which cannot overflow."""
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


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
