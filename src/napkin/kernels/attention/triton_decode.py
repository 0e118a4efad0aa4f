"""The Triton kernels of attention of one new token per sequence to keys and values in blocks.

A program has one sequence, one head of keys and one part of its keys ("split"): it reads them once for all heads of
queries that share them, and keeps a running maximum, sum and mixture as in triton_flash.py. A second kernel puts the
parts together by their logsumexps ("flash decoding", Dao et al. 2023). Blocks are read where they are, also in int8,
whose numbers are multiplied by their scales in registers.

Only the numbers of sequences and splits depend on the lengths: a longer sequence needs no other kernel.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.attention.decode import KEYS_AT_ONCE, split_sizes
from napkin.kernels.attention.triton_flash import LOG2_E, tanh
from napkin.kernels.triton_tiles import dot_precision


def attend_to_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    table: Tensor,
    longest: int,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    scale: float,
    cap: float,
    window: int,
) -> Tensor:
    """See `napkin.kernels.attention.decode.attend_to_slots_reference`."""
    given = counts, table, longest, key_scales, value_scales, scale, cap, window
    parts, logsumexp = attend_to_splits(query, key, value, *given)
    return parts if parts.shape[2] == 1 else joined(parts, logsumexp, query.dtype)


def attend_to_splits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    table: Tensor,
    longest: int,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    scale: float,
    cap: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """See `napkin.kernels.attention.decode.attend_to_splits`."""
    n_sequences, n_heads, _, width = query.shape
    n_kv_heads, block_size = key.shape[1:3]
    group = n_heads // n_kv_heads
    splits, keys_of_split = split_sizes(longest, window)
    dtype = query.dtype if splits == 1 else torch.float32
    parts = query.new_empty(n_sequences, n_heads, splits, width, dtype=dtype)
    logsumexp = query.new_empty(n_sequences, n_heads, splits, dtype=torch.float32)
    split_kernel[(n_sequences * n_kv_heads, splits)](
        query, key, value, counts, table, key_scales, value_scales, parts, logsumexp,
        query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3],
        table.shape[1], block_size, n_kv_heads, group, splits, keys_of_split, window, scale, cap,
        HEAD=width, WIDTH=max(16, triton.next_power_of_2(width)), GROUP=max(16, triton.next_power_of_2(group)),
        QUANTIZED=key_scales is not None, CAPPED=cap > 0, WINDOWED=window > 0,
        BLOCK=KEYS_AT_ONCE, PRECISION=dot_precision(query.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
    return parts, logsumexp


def joined(parts: Tensor, logsumexp: Tensor, dtype: torch.dtype) -> Tensor:
    """The splits of each head of each sequence in one: [sequence, head, 1, number]."""
    n_sequences, n_heads, splits, width = parts.shape
    mixed = parts.new_empty(n_sequences, n_heads, 1, width, dtype=dtype)
    join_kernel[(n_sequences * n_heads,)](
        parts, logsumexp, mixed, splits, HEAD=width, WIDTH=max(16, triton.next_power_of_2(width)),
        SPLITS=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    return mixed


@triton.jit
@no_type_check
def split_kernel(
    query, key, value, counts, table, key_scales, value_scales, parts, logsumexp,
    q_batch, q_head, k_block, k_head, k_slot, v_block, v_head, v_slot,
    n_blocks, block_size, n_kv_heads, group, splits, keys_of_split, window, scale, cap,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, QUANTIZED: tl.constexpr, CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part of the keys of one sequence and head of keys: grid [sequences · kv_heads, splits]."""
    sequence = tl.cast(tl.program_id(0) // n_kv_heads, tl.int64)
    kv_head = tl.program_id(0) % n_kv_heads
    split = tl.program_id(1)
    count = tl.load(counts + sequence).to(tl.int32)
    begin = split * keys_of_split
    if WINDOWED:
        begin += tl.maximum(count - window, 0)
    end = tl.minimum(begin + keys_of_split, count)

    numbers = tl.arange(0, WIDTH)
    heads = tl.arange(0, GROUP)
    q_at = query + sequence * q_batch + (kv_head * group + heads)[:, None] * q_head + numbers[None, :]
    here = (heads[:, None] < group) & (numbers[None, :] < HEAD)
    q = tl.load(q_at, mask=here, other=0.0)
    mixture = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    total = tl.zeros((GROUP,), dtype=tl.float32)
    largest = tl.full((GROUP,), float("-inf"), dtype=tl.float32)

    for start in range(begin, end, BLOCK):
        places = start + tl.arange(0, BLOCK)
        seen = places < end
        block = tl.load(table + sequence * n_blocks + places // block_size, mask=seen, other=0).to(tl.int64)
        slot = places % block_size
        inside = seen[:, None] & (numbers[None, :] < HEAD)
        k_at = key + (block * k_block + kv_head * k_head + slot * k_slot)[:, None] + numbers[None, :]
        k = tl.load(k_at, mask=inside, other=0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if QUANTIZED:
            # A scale of each vector: its products are multiplied, not its numbers.
            of_slot = (block * n_kv_heads + kv_head) * block_size + slot
            scores *= tl.load(key_scales + of_slot, mask=seen, other=0.0).to(tl.float32)[None, :]
        if CAPPED:
            scores = cap * tanh(scores / cap)
        scores = tl.where(seen[None, :], scores * LOG2_E, float("-inf"))
        # Every block has a key that is seen.
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        decay = tl.exp2(largest - larger)
        total = total * decay + tl.sum(weights, 1)
        v_at = value + (block * v_block + kv_head * v_head + slot * v_slot)[:, None] + numbers[None, :]
        v = tl.load(v_at, mask=inside, other=0).to(q.dtype)
        if QUANTIZED:
            weights *= tl.load(value_scales + of_slot, mask=seen, other=0.0).to(tl.float32)[None, :]
        mixture = mixture * decay[:, None]
        mixture = tl.dot(weights.to(v.dtype), v, mixture, input_precision=PRECISION)
        largest = larger

    # A split beyond the end of its sequence has seen nothing: its logsumexp is -inf, and it weighs nothing.
    some = total > 0
    row = (sequence * n_kv_heads + kv_head) * group + heads
    tl.store(
        logsumexp + row * splits + split,
        tl.where(some, largest + tl.log2(tl.where(some, total, 1.0)), float("-inf")),
        mask=heads < group,
    )
    parts_at = parts + (row * splits + split)[:, None] * HEAD + numbers[None, :]
    mixture /= tl.where(some, total, 1.0)[:, None]
    tl.store(parts_at, mixture.to(parts.dtype.element_ty), mask=here)


@triton.jit
@no_type_check
def join_kernel(
    parts, logsumexp, mixed, splits, HEAD: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """The splits of one head of one sequence, weighted by their sums of exponentials: grid [sequences · heads]."""
    row = tl.cast(tl.program_id(0), tl.int64)
    split = tl.arange(0, SPLITS)
    numbers = tl.arange(0, WIDTH)
    sums = tl.load(logsumexp + row * splits + split, mask=split < splits, other=float("-inf"))
    weights = tl.exp2(sums - tl.max(sums, 0))
    inside = (split < splits)[:, None] & (numbers < HEAD)[None, :]
    part = tl.load(parts + (row * splits + split)[:, None] * HEAD + numbers[None, :], mask=inside, other=0.0)
    result = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(mixed + row * HEAD + numbers, result.to(mixed.dtype.element_ty), mask=numbers < HEAD)
