"""Attention's kernels as compiled for compute capability 8.0 and 9.0, against attention spelled out in fp64."""

import dataclasses
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from napkin.kernels.attention.decode import attend_to_slots_reference
from napkin.kernels.attention.flash import flash_attention
from napkin.kernels.triton_tiles import AttentionTile, forced
from oracles.masked_attention import attention_by_hand, gradients, problem
from oracles.paged_attention import problem_of_slots
from oracles.ptx.launches import executing_ptx

SMALL = AttentionTile(queries=16, keys=16, warps=1, stages=1)
"""Products in fp32 take an instruction for each number of a thread."""
ALL_PAIRS = {"head_dim": 64, "n_queries": 33, "n_keys": 97, "is_causal": False}
BOUNDED = {"head_dim": 32, "n_queries": 70, "n_keys": 83, "offset": 13, "window": 20, "softcap": 3.0, "documents": True}


@pytest.mark.parametrize(
    ("case", "dtype", "bound", "capability"),
    [
        (ALL_PAIRS, torch.bfloat16, 4e-2, 80),
        (ALL_PAIRS, torch.bfloat16, 4e-2, 90),
        (BOUNDED, torch.bfloat16, 4e-2, 80),
        (BOUNDED, torch.float16, 4e-3, 90),
        ({"head_dim": 40, "n_queries": 70, "n_keys": 70}, torch.float16, 4e-3, 80),
        ({"head_dim": 16, "n_queries": 17, "n_keys": 35, "offset": 9, "window": 7}, torch.float32, 1e-5, 80),
    ],
    ids=["all pairs", "all pairs, Hopper", "bounded", "bounded in fp16, Hopper", "causal in fp16", "window in fp32"],
)
def test_compiled_flash_attention_and_its_gradients(
    case: dict[str, Any], dtype: torch.dtype, bound: float, capability: int
) -> None:
    inputs, upstream, settings = problem(**case, dtype=dtype)
    expected = attention_by_hand(inputs, settings)
    kernels = ("forward", "backward_keys", "backward_queries") if dtype == torch.float32 else ()
    with ExitStack() as stack:
        executed = stack.enter_context(executing_ptx(capability))
        for kernel in kernels:
            stack.enter_context(forced(f"attention {kernel}", SMALL))
        actual = flash_attention(*inputs, **settings)
        grads = gradients(actual, inputs, upstream)
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)
    for mine, theirs in zip(grads, gradients(expected, inputs, upstream), strict=True):
        assert (mine.double() - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max()))
    assert [each.kernel.removesuffix("_kernel") for each in executed] == [
        "attend", "product", "key_gradient", "query_gradient",
    ]  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize(("kv", "capability"), [("auto", 80), ("int8", 80), ("int8", 90)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size", "counts", "softcap", "window"),
    [(4, 2, 64, 16, [40, 1, 16, 530], None, 0), (6, 1, 40, 8, [7, 130], 5.0, 100)],
)
def test_compiled_attention_to_blocks(
    heads: int,
    kv_heads: int,
    width: int,
    block_size: int,
    counts: list[int],
    softcap: float | None,
    window: int,
    kv: str,
    capability: int,
) -> None:
    from napkin.kernels.attention.triton_decode import attend_to_slots

    dtype = torch.bfloat16
    inputs, slots = problem_of_slots(heads, kv_heads, width, block_size, counts, kv=kv, dtype=dtype)
    scales = (None, None) if slots.scales is None else slots.scales
    with executing_ptx(capability) as executed:
        where = slots.counts, slots.table, slots.longest
        found = attend_to_slots(*inputs, *where, *scales, width**-0.5, softcap or 0.0, window)
    slots = dataclasses.replace(slots, window=window)
    expected = attend_to_slots_reference(*inputs, slots, width**-0.5, softcap)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    splits = 2 if max(counts) > 512 else 1
    assert [each.kernel for each in executed] == ["split_kernel", "join_kernel"][:splits]
