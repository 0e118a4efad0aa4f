"""The Triton kernels that round a tensor to fp8: one reads it for its largest number, one divides by the scale.

Between them are partial maxima, one for each program of the first, which every program of the second reads: 5 bytes are
moved per number in bf16, where torch's operators move 13 in eight launches.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.triton_tiles import ELEMENTWISE

_MOST_PARTS = 1024
"""Partial maxima that the second kernel's programs read, each in one load."""


def fp8_quantize(x: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """See `napkin.kernels.products.linear.fp8_quantize_reference`."""
    x = x.contiguous()
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    result, scale = torch.empty_like(x, dtype=dtype), x.new_empty((), dtype=torch.float32)
    block, numel = ELEMENTWISE.block, x.numel()
    n_blocks = max(1, triton.cdiv(numel, block))
    per_part = triton.cdiv(n_blocks, _MOST_PARTS)
    n_parts = triton.cdiv(n_blocks, per_part)
    maxima = x.new_empty(n_parts, dtype=torch.float32)
    largest_kernel[(n_parts,)](x, maxima, numel, per_part, BLOCK=block, num_warps=ELEMENTWISE.warps)
    round_kernel[(n_blocks,)](
        x, maxima, scale, result, numel, n_parts, 1 / torch.finfo(dtype).max, PARTS=triton.next_power_of_2(n_parts),
        BLOCK=block, num_warps=ELEMENTWISE.warps,
    )  # fmt: skip
    return result, scale


@triton.jit
@no_type_check
def largest_kernel(x, maxima, numel, per_part, BLOCK: tl.constexpr):
    """Each program reads some blocks."""
    part = tl.cast(tl.program_id(0), tl.int64)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(0, per_part):
        at = (part * per_part + place) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)))
    tl.store(maxima + part, tl.max(largest, 0))


@triton.jit
@no_type_check
def round_kernel(
    x, maxima, scale, result, numel, n_parts, share, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program writes a block; the first the scale."""
    parts = tl.arange(0, PARTS)
    largest = tl.max(tl.load(maxima + parts, mask=parts < n_parts, other=0.0), 0)
    # The next power of two, by the bits of the number: a logarithm that is rounded could miss one.
    bits = tl.maximum(largest * share, 1e-30).to(tl.int32, bitcast=True)
    divisor = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    block = tl.cast(tl.program_id(0), tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32) / divisor
    tl.store(result + at, values.to(result.dtype.element_ty), mask=at < numel)
    tl.store(scale, divisor, mask=block == 0)
