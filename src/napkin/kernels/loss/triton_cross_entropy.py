"""Cross-entropy of a chunk of logits, which become their own gradient in place (as in Hsu et al. 2024, Liger).

A program has one row. It reads the row once for the running maximum and sum of exponentials, and once more to write the
gradient of the row's loss over it: softmax · (1 + 2 · z · logsumexp) - onehot, times the slope of the soft cap.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.attention.triton_flash import tanh
from napkin.kernels.triton_tiles import cross_entropy_tile, tuned


def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, ignore_index: int, z_weight: float, softcap: float, wants_gradient: bool
) -> Tensor:
    """See `napkin.kernels.loss.cross_entropy.in_place_reference`."""
    rows, vocab_size = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        tile = tuned("cross-entropy", cross_entropy_tile(vocab_size), logits, vocab_size)
        cross_entropy_kernel[(rows,)](
            logits, targets, losses, logits.stride(0), vocab_size, ignore_index, z_weight, softcap,
            CAPPED=softcap > 0, GRADIENT=wants_gradient, BLOCK=tile.block, num_warps=tile.warps,
        )  # fmt: skip
    return losses


@triton.jit
@no_type_check
def cross_entropy_kernel(
    logits, targets, losses, row_stride, vocab_size, ignore_index, z_weight, softcap,
    CAPPED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes one row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    logits += row * row_stride
    target = tl.load(targets + row)
    counts = target != ignore_index
    target = tl.where(counts, target, 0)
    largest = float("-inf")
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = _capped(logits, columns, vocab_size, softcap, CAPPED)
        larger = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger), 0)
        largest = larger
    logsumexp = largest + tl.log(total)
    chosen = tl.load(logits + target).to(tl.float32)
    if CAPPED:
        chosen = softcap * tanh(chosen / softcap)
    tl.store(losses + row, tl.where(counts, logsumexp - chosen + z_weight * logsumexp * logsumexp, 0.0))
    if GRADIENT:
        # The chosen logit has been read before any is overwritten.
        tl.debug_barrier()
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = _capped(logits, columns, vocab_size, softcap, CAPPED)
            slope = tl.exp(values - logsumexp) * (1.0 + 2.0 * z_weight * logsumexp)
            slope = slope - tl.where(columns == target, 1.0, 0.0)
            if CAPPED:
                bounded = tl.where(columns < vocab_size, values / softcap, 0.0)
                slope = slope * (1.0 - bounded * bounded)
            slope = tl.where(counts, slope, 0.0)
            tl.store(logits + columns, slope.to(logits.dtype.element_ty), mask=columns < vocab_size)


@triton.jit
@no_type_check
def _capped(logits, columns, vocab_size, softcap, CAPPED: tl.constexpr):
    values = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    if CAPPED:
        values = tl.where(columns < vocab_size, softcap * tanh(values / softcap), float("-inf"))
    return values
