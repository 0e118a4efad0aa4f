"""The forward kernel of FlashAttention-2 (Dao 2023, algorithm 1): a program computes one block of queries.

It reads the keys block by block and keeps a running maximum, a running sum of exponentials and the values weighted so
far. Blocks of keys that no query of the block sees are not read; those that every query sees need no mask.
"""

# pyright: reportMissingImports=false

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.triton.attention_scores import LOG2_E, first_keys, is_seen, load_rows, store_rows, tanh
from napkin.kernels.triton.tiles import dot_precision
from napkin.kernels.triton.tuned_tiles import attention_tile


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
    """See `napkin.kernels.attention_flash.forward_reference`."""
    batch, heads, n_queries, head_dim = query.shape
    mixed = torch.empty_like(query)
    logsumexp = query.new_empty(batch, heads, n_queries, dtype=torch.float32)
    if not query.numel():
        return mixed, logsumexp
    bounded = bounds is not None or window > 0 or softcap > 0
    tile = attention_tile("forward", query, bounded=bounded, is_causal=is_causal)
    grid = (triton.cdiv(n_queries, tile.queries), batch * heads)
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
def attend_kernel(
    query, key, value, mixed, logsumexp, starts,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    n_queries, n_keys, n_heads, group, scale, softcap, window, offset,
    HEAD: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: grid [blocks of queries, batch · heads]."""
    # Late blocks see the most keys: they begin first, so that short ones fill the gaps at the end.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = tl.cast(tl.program_id(1) // n_heads, tl.int64)
    head = tl.program_id(1) % n_heads
    query += batch * q_batch + tl.cast(head, tl.int64) * q_head
    key += batch * k_batch + tl.cast(head // group, tl.int64) * k_head
    value += batch * v_batch + tl.cast(head // group, tl.int64) * v_head
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
        mixture, total, largest = _read_keys(
            mixture, total, largest, q, key, value, k_row, v_row, positions, first, begin, whole_begin, n_keys, scale,
            softcap, HEAD, WIDTH, CAUSAL, True, CAPPED, True, BLOCK_N, PRECISION,
        )  # fmt: skip
        whole_end = tl.maximum(whole_begin, whole_end)
    mixture, total, largest = _read_keys(
        mixture, total, largest, q, key, value, k_row, v_row, positions, first, whole_begin, whole_end, n_keys, scale,
        softcap, HEAD, WIDTH, CAUSAL, False, CAPPED, False, BLOCK_N, PRECISION,
    )  # fmt: skip
    mixture, total, largest = _read_keys(
        mixture, total, largest, q, key, value, k_row, v_row, positions, first, whole_end, end, n_keys, scale,
        softcap, HEAD, WIDTH, CAUSAL, WINDOWED or PACKED, CAPPED, True, BLOCK_N, PRECISION,
    )  # fmt: skip

    # Rows beyond the last query may have seen nothing.
    total = tl.where(total == 0, 1.0, total)
    mixed += batch * o_batch + tl.cast(head, tl.int64) * o_head
    store_rows(mixed, mixture / total[:, None], start, o_row, n_queries, HEAD, WIDTH, BLOCK_M)
    rows = start + tl.arange(0, BLOCK_M)
    logsumexp += tl.cast(tl.program_id(1), tl.int64) * n_queries
    tl.store(logsumexp + rows, (largest + tl.log2(total)) / LOG2_E, mask=rows < n_queries)


@triton.jit
@no_type_check
def _read_keys(
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
