"""AdamW's update for all tensors of a group in one launch, which finds them by a table of addresses.

Each program updates a chunk of one tensor. Which chunk of which tensor that is stands in a map, made once for the sizes
of the tensors; their addresses stand in a table, made again when one of them changes, as those of gradients may from
step to step.
"""

import functools
from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.triton_tiles import ELEMENTWISE, tuned
from napkin.tensors import sent_to

BLOCKS_OF_A_CHUNK = 16
"""Blocks that a program updates one after the other: fewer would make the map longer."""
_ALIGNED = 16
"""Bytes that a thread reads at a time where addresses and sizes are divisible by as many."""
_KEPT = 64
"""Tables and maps that are kept on the device: an optimizer has one for each format and group."""
_NAMES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    copies: Sequence[Tensor],
    factor: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """See `napkin.kernels.pointwise.adamw.adamw_reference`."""
    lists = (parameters, gradients, averages, squares, *([copies] if copies else []))
    alike: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}
    for tensors in zip(*lists, strict=True):
        if tensors[0].numel():
            is_aligned = not any(each.data_ptr() % _ALIGNED for each in tensors) and not tensors[0].numel() % _ALIGNED
            alike.setdefault((*(each.dtype for each in tensors), is_aligned), []).append(tensors)
    for (*dtypes, is_aligned), group in alike.items():
        device = group[0][0].device
        tile = tuned("adamw", ELEMENTWISE, group[0][0], 1)
        chunk = BLOCKS_OF_A_CHUNK * tile.block
        chunks = chunk_map(device, tuple(tensors[0].numel() for tensors in group), chunk)
        addresses = _table(device, len(dtypes), tuple(each.data_ptr() for tensors in group for each in tensors))
        adamw_kernel[(len(chunks),)](
            addresses, chunks, factor,
            1 - lr * weight_decay, lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, beta1, beta2, eps,
            1 - beta1, 1 - beta2,
            LISTS=len(dtypes), PARAMETER=_NAMES[dtypes[0]], GRADIENT=_NAMES[dtypes[1]],
            COPY=_NAMES[dtypes[-1]], ALIGNED=_ALIGNED if is_aligned else 1, BLOCK=tile.block,
            BLOCKS=BLOCKS_OF_A_CHUNK, num_warps=tile.warps,
        )  # fmt: skip


@functools.lru_cache(maxsize=_KEPT)
def chunk_map(device: torch.device, sizes: tuple[int, ...], chunk: int) -> Tensor:
    """For each program its tensor, the first of its numbers there, and how many numbers the tensor has, [programs, 3];
    each tensor begins a chunk."""
    rows = [(place, start, numel) for place, numel in enumerate(sizes) for start in range(0, numel, chunk)]
    return sent_to(device, torch.tensor(rows, dtype=torch.int64))


@functools.lru_cache(maxsize=_KEPT)
def _table(device: torch.device, lists: int, addresses: tuple[int, ...]) -> Tensor:
    """The addresses of each place's tensors, [tensors, lists]."""
    return sent_to(device, torch.tensor(addresses, dtype=torch.int64).view(-1, lists))


@triton.jit
@no_type_check
def adamw_kernel(
    addresses, chunks, factor, kept, rate, root_correction, beta1, beta2, eps, rest1, rest2,
    LISTS: tl.constexpr, PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A chunk: each number is read and written once, the copy in its narrower format in the same pass."""
    chunks += tl.cast(tl.program_id(0), tl.int64) * 3
    addresses += tl.load(chunks) * LISTS
    first, numel = tl.multiple_of(tl.load(chunks + 1), BLOCK), tl.load(chunks + 2)
    left = tl.multiple_of(tl.minimum(numel - first, BLOCKS * BLOCK).to(tl.int32), ALIGNED)
    parameter = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(PARAMETER)), ALIGNED) + first
    gradient = tl.multiple_of(tl.load(addresses + 1).to(tl.pointer_type(GRADIENT)), ALIGNED) + first
    average = tl.multiple_of(tl.load(addresses + 2).to(tl.pointer_type(tl.float32)), ALIGNED) + first
    square = tl.multiple_of(tl.load(addresses + 3).to(tl.pointer_type(tl.float32)), ALIGNED) + first
    if LISTS == 5:
        copy = tl.multiple_of(tl.load(addresses + 4).to(tl.pointer_type(COPY)), ALIGNED) + first
    numbers = tl.arange(0, BLOCK)
    for at in range(0, BLOCKS * BLOCK, BLOCK):
        at = tl.multiple_of(at, BLOCK) + numbers
        inside = at < left
        p = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        if factor is not None:
            g *= tl.load(factor)
        m = beta1 * tl.load(average + at, mask=inside, other=0.0) + rest1 * g
        v = beta2 * tl.load(square + at, mask=inside, other=0.0) + rest2 * g * g
        p = kept * p - rate * m / (tl.sqrt(v) * root_correction + eps)
        tl.store(average + at, m, mask=inside)
        tl.store(square + at, v, mask=inside)
        tl.store(parameter + at, p.to(PARAMETER), mask=inside)
        if LISTS == 5:
            tl.store(copy + at, p.to(COPY), mask=inside)
