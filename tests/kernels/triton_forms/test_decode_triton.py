"""Triton's kernels of attention to keys in blocks, in Triton's interpreter, against the formula."""

import dataclasses

import pytest
import torch

from napkin.accounting.recording import record
from napkin.kernels.attention.decode import (
    attend_to_slots,
    attend_to_slots_reference,
    attend_to_splits,
)
from oracles.paged_attention import problem_of_slots


@torch.inference_mode()
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size", "counts"),
    [
        (4, 2, 64, 16, [40, 1, 16, 700]),
        (6, 1, 40, 8, [7, 130]),
        (5, 5, 128, 16, [513, 512, 65]),
        (32, 1, 16, 300, [299, 150]),
        (2, 2, 96, 1, [64]),
    ],
)
def test_kernels_equal_the_formula(
    heads: int, kv_heads: int, width: int, block_size: int, counts: list[int], kv: str
) -> None:
    for softcap in (None, 5.0):
        inputs, slots = problem_of_slots(heads, kv_heads, width, block_size, counts, kv=kv, dtype=torch.float32)
        # A slot beyond the end has no number that may be read.
        found = attend_to_slots(*inputs, slots, width**-0.5, softcap)
        expected = attend_to_slots_reference(*inputs, slots, width**-0.5, softcap)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@pytest.mark.parametrize("window", [1, 37, 600, 5000])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_only_a_window_is_read(window: int, kv: str) -> None:
    block_size, counts = 16, [1300, 40, 601]
    inputs, slots = problem_of_slots(4, 2, 64, block_size, counts, kv=kv, dtype=torch.float32)
    expected = attend_to_slots_reference(*inputs, dataclasses.replace(slots, window=window), 0.125)
    for row, count in enumerate(counts):
        for place in range(max(0, count - window) // block_size):
            for each in slots.scales or inputs[1:]:
                each[slots.table[row, place]] = float("nan")
    found = attend_to_slots(*inputs, dataclasses.replace(slots, window=window), 0.125)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@pytest.mark.parametrize("window", [0, 600])
def test_splits_weighted_by_their_sums_are_the_result(window: int) -> None:
    inputs, slots = problem_of_slots(4, 2, 64, 16, [1300, 40, 601], kv="auto", dtype=torch.float32)
    slots = dataclasses.replace(slots, window=window)
    parts, sums = attend_to_splits(*inputs, slots, 0.125)
    assert parts.shape[2] == (2 if window else 3)
    joined = (torch.exp2(sums - sums.amax(2, keepdim=True)).nan_to_num()[..., None] * parts.nan_to_num()).sum(2)
    joined /= torch.exp2(sums - sums.amax(2, keepdim=True)).sum(2)[..., None]
    expected = attend_to_slots_reference(*inputs, slots, 0.125)[:, :, 0]
    torch.testing.assert_close(joined, expected, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
def test_kernels_equal_the_formula_in_fp16() -> None:
    inputs, slots = problem_of_slots(8, 2, 64, 16, [300, 33], kv="auto", dtype=torch.float16)
    found = attend_to_slots(*inputs, slots, 0.125)
    torch.testing.assert_close(found, attend_to_slots_reference(*inputs, slots, 0.125), rtol=2e-3, atol=2e-3)


@torch.inference_mode()
def test_attention_to_blocks_is_one_operator_that_is_counted() -> None:
    inputs, slots = problem_of_slots(4, 2, 64, 16, [40, 1], kv="auto", dtype=torch.float32)
    ledger = record(torch.nn.Identity(), lambda: attend_to_slots(*inputs, slots, 0.125), warm_up=0)
    assert [row.operator for row in ledger.rows] == ["fused_attend_to_slots"]
    assert ledger.flops > 0
    assert not ledger.unknown_operators
