"""Attention of one new token per sequence to keys and values in blocks: the formula, a compiled loop for a CPU
(numba_decode.py) that reads bf16, fp32 and int8 in place, and Triton kernels for a GPU (triton_decode.py).

Loop and kernels are operators, which a meter sees: what is computed does not depend on whether it is metered.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from napkin.kernels.operators import (
    DTYPES,
    FOR_DECODING,
    KERNELS,
    cpu_operator,
    is_interpreted,
    may_be_compiled,
    on_threads,
    operator,
    triton_obstacle,
)

_SMALLEST_WIDTH = 128
"""Numbers of a token's keys from which the compiled attention is used; that of smaller models is soon done."""

Scales = Float[Tensor, "n_blocks kv_heads slot 1"]
Blocks = Float[Tensor, "block kv_heads slot head_dim"] | Int8[Tensor, "block kv_heads slot head_dim"]


@dataclass(frozen=True)
class Slots:
    """The slots of the keys that the one new token of each sequence sees.

    Sequence b sees the first counts[b] slots of its blocks, which are numbers table[b] of keys and values
    [block, kv_heads, slot, head_dim]; counts are at least 1. With a window it sees the last of them only.
    """

    counts: Int[Tensor, " batch"]
    table: Int[Tensor, "batch block"]
    longest: int
    """The largest of the counts."""
    scales: tuple[Scales, Scales] | None = None
    """Scales of keys and values in int8."""
    window: int = 0
    """Slots that are seen at most, which only Triton's kernels know; 0 is all."""


def attend_to_slots_reference(
    queries: Float[Tensor, "batch heads 1 head_dim"],
    keys: Blocks,
    values: Blocks,
    slots: Slots,
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "batch heads 1 head_dim"]:
    """Attend in fp32, one sequence after another: the formula."""
    rows = [
        scores.softmax(dim=-1) @ seen
        for scores, seen in _scores_and_values(queries, keys, values, slots, scale, softcap)
    ]
    return torch.stack(rows).to(queries.dtype)


def _scores_and_values(
    queries: Tensor, keys: Tensor, values: Tensor, slots: Slots, scale: float, softcap: float | None
) -> Iterator[tuple[Float[Tensor, "heads 1 key"], Float[Tensor, "heads key head_dim"]]]:
    """The scores of the keys that each sequence sees, and their values, in fp32."""
    if slots.scales is not None:
        keys, values = (
            each.float() * scales.float() for each, scales in zip((keys, values), slots.scales, strict=True)
        )
    for query, count, blocks in zip(queries.float(), slots.counts.tolist(), slots.table, strict=True):
        first = max(0, count - slots.window) if slots.window else 0
        seen_keys, seen_values = (
            each[blocks]
            .transpose(0, 1)
            .flatten(1, 2)[:, first:count]
            .float()
            .repeat_interleave(len(query) // each.shape[1], 0)
            for each in (keys, values)
        )
        scores = query @ seen_keys.mT * scale
        yield scores if softcap is None else softcap * torch.tanh(scores / softcap), seen_values


def attend_to_slots(
    queries: Float[Tensor, "batch heads 1 head_dim"],
    keys: Blocks,
    values: Blocks,
    slots: Slots,
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "batch heads 1 head_dim"]:
    """`attend_to_slots_reference` by the compiled loop or, on a GPU, by Triton kernels.

    Keys and values are in a format of floats with the same strides, the last two contiguous; or int8 without gaps, and
    so their scales.
    """
    key_scales, value_scales = (None, None) if slots.scales is None else slots.scales
    arguments = queries, keys, values, slots.counts, slots.table, slots.longest, key_scales, value_scales, scale
    if queries.device.type == "cpu" and not is_interpreted():
        assert not slots.window
        return _attend(*arguments, softcap or 0.0)
    return _fused_attend(*arguments, softcap or 0.0, slots.window)


def reads_slots(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """True if `attend_to_slots` is faster than torch for keys of that kind, `width` numbers per token."""
    if not may_be_compiled():
        return False
    if device.type == "cuda" or is_interpreted():
        return (dtype in DTYPES or dtype == torch.int8) and triton_obstacle(device.type) is None
    return dtype in (torch.bfloat16, torch.float32, torch.int8) and device.type == "cpu" and width >= _SMALLEST_WIDTH


@cpu_operator(
    "attend_to_slots(Tensor query, Tensor key, Tensor value, Tensor counts, Tensor table, int longest, "
    "Tensor? key_scales, Tensor? value_scales, float scale, float cap) -> Tensor",
    lambda query, *others: torch.empty_like(query, memory_format=torch.contiguous_format),
)
def _attend(
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
) -> Tensor:
    n_sequences, n_heads, _, width = query.shape
    (n_kv_heads, block_size), n_blocks = key.shape[1:3], table.shape[1]
    wide = query.float().contiguous()
    mixed = torch.empty_like(wide)
    assert key.dtype == value.dtype
    assert key.stride() == value.stride()
    assert key.stride()[2:] == (width, 1)
    assert (key_scales is None) == (value_scales is None) == (key.dtype != torch.int8)
    if key_scales is not None and value_scales is not None:
        assert all(each.is_contiguous() for each in (key, key_scales, value_scales))
    KERNELS.load(*FOR_DECODING)
    group, name = n_heads // n_kv_heads, str(key.dtype).removeprefix("torch.").replace("bfloat16", "bf16")
    sizes = n_kv_heads, group, width, n_blocks, block_size, key.stride(0), key.stride(1), longest
    on_threads(
        f"attention.numba_decode.attend_{name}",
        (wide, key, value, key_scales, value_scales, mixed, counts, table),
        (*sizes, scale, cap),
        n_rows=n_sequences,
        n_columns=2 * n_kv_heads * longest * width,
        buffer_size=group * (longest + 1),
    )
    return mixed.to(query.dtype)


def attend_to_splits(
    queries: Float[Tensor, "batch heads 1 head_dim"],
    keys: Blocks,
    values: Blocks,
    slots: Slots,
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "batch heads split head_dim"], Float[Tensor, "batch heads split"]]:
    """`attend_to_slots` before its last launch: the mixtures of the values of each split, and the base-2 logarithms of
    its sums of exponentials, by which they are to be weighted. A single split is the result."""
    key_scales, value_scales = (None, None) if slots.scales is None else slots.scales
    arguments = queries, keys, values, slots.counts, slots.table, slots.longest, key_scales, value_scales, scale
    return _fused_splits(*arguments, softcap or 0.0, slots.window)


KEYS_OF_SPLIT = 512
"""Keys of a split, unless that makes more than MOST_SPLITS of the longest sequence."""
MOST_SPLITS = 64
KEYS_AT_ONCE = 64
"""Number of keys that a program of the Triton kernel reads at once."""


def split_sizes(longest: int, window: int) -> tuple[int, int]:
    """Splits of the longest sequence, and the keys of each."""
    seen = min(longest, window or longest)
    splits = min(MOST_SPLITS, -(-seen // KEYS_OF_SPLIT))
    return splits, -(-seen // (splits * KEYS_AT_ONCE)) * KEYS_AT_ONCE


def _slots(arguments: tuple[Any, ...]) -> tuple[Slots, float, float]:
    """The arguments of a fused operator behind its tensors of queries, keys and values."""
    counts, table, longest, key_scales, value_scales, scale, cap, window = arguments
    scales = None if key_scales is None else (key_scales, value_scales)
    return Slots(counts, table, longest, scales, window), scale, cap


def _plain(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
    slots, scale, cap = _slots(arguments)
    return attend_to_slots_reference(query, key, value, slots, scale, cap or None)


def _plain_splits(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    slots, scale, cap = _slots(arguments)
    parts, sums = _empty_splits(query, key, value, *arguments)
    parts.zero_()
    sums.fill_(-torch.inf)
    _, keys_of_split = split_sizes(slots.longest, slots.window)
    seen = _scores_and_values(query, key, value, slots, scale, cap or None)
    for row, (scores, values) in enumerate(seen):
        pairs = zip(scores.split(keys_of_split, dim=2), values.split(keys_of_split, dim=1), strict=True)
        for split, (of_split, split_values) in enumerate(pairs):
            parts[row, :, split] = (of_split.softmax(dim=-1) @ split_values)[:, 0]
            sums[row, :, split] = of_split.logsumexp(dim=-1)[:, 0] / math.log(2)
    return parts, sums


def _empty_splits(
    query: Tensor, key: Tensor, value: Tensor, counts: Tensor, table: Tensor, longest: int, *others: Any
) -> tuple[Tensor, Tensor]:
    n_sequences, n_heads, _, width = query.shape
    splits, _ = split_sizes(longest, others[-1])
    dtype = query.dtype if splits == 1 else torch.float32
    parts = query.new_empty(n_sequences, n_heads, splits, width, dtype=dtype)
    return parts, query.new_empty(n_sequences, n_heads, splits, dtype=torch.float32)


_fused_attend = operator(
    "fused_attend_to_slots(Tensor query, Tensor key, Tensor value, Tensor counts, Tensor table, int longest, "
    "Tensor? key_scales, Tensor? value_scales, float scale, float cap, int window) -> Tensor",
    fake=lambda query, *others: torch.empty_like(query, memory_format=torch.contiguous_format),
    triton="attention.triton_decode.attend_to_slots",
)(_plain)

_fused_splits = operator(
    "fused_attend_to_splits(Tensor query, Tensor key, Tensor value, Tensor counts, Tensor table, int longest, "
    "Tensor? key_scales, Tensor? value_scales, float scale, float cap, int window) -> (Tensor, Tensor)",
    fake=_empty_splits,
    triton="attention.triton_decode.attend_to_splits",
)(_plain_splits)
