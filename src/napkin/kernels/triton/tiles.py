"""The tiles of the kernels: how many numbers a program holds at a time, and how many threads it has.

Those here are taken where none was tuned (`tuned_tiles.py`). A tile has to fit into the registers of its threads: a
compiler that runs out of them spills to memory, and the kernel becomes several times slower. The sizes below spill
nothing on sm_80, sm_90 and sm_100; `benchmarks/cubins.py` reads that from the compiled kernels.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

AttentionKernel = Literal["forward", "backward_keys", "backward_queries"]


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """What one program holds, and how it runs."""

    queries: int
    keys: int
    warps: int
    """Of 32 threads."""
    stages: int
    """Blocks of keys, or of queries, on their way from memory at a time."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """Of a program that holds a whole row."""

    warps: int


@dataclass(frozen=True, slots=True)
class BlockTile:
    """Of a program that holds some numbers of a row, or of a whole tensor."""

    block: int
    warps: int


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Of a program that computes a block of a product."""

    rows: int
    columns: int
    depth: int
    """Products that are added up at a time."""
    warps: int
    stages: int


Tile = AttentionTile | RowTile | BlockTile | ProductTile

TILES: dict[str, type[Tile]] = {
    "attention forward": AttentionTile,
    "attention backward_keys": AttentionTile,
    "attention backward_queries": AttentionTile,
    "norm": RowTile,
    "norm backward": RowTile,
    "rotation": RowTile,
    "swiglu": BlockTile,
    "swiglu backward": BlockTile,
    "gelu": BlockTile,
    "gelu backward": BlockTile,
    "adamw": BlockTile,
    "cross-entropy": BlockTile,
    "grouped product": ProductTile,
    "grouped outer product": ProductTile,
}
"""The kernels whose tiles can be tuned, and what a tile of each says."""

ELEMENTWISE = BlockTile(1024, 4)
"""Eight numbers for each of 128 threads."""
PRODUCT = ProductTile(64, 64, 32, 4, 3)

_Tiles = dict[AttentionKernel, dict[int, AttentionTile]]
"""By kernel and widest head."""

HALF: _Tiles = {
    "forward": {64: AttentionTile(128, 64, 4, 3), 128: AttentionTile(128, 64, 8, 3), 256: AttentionTile(64, 32, 8, 2)},
    "backward_keys": {
        64: AttentionTile(64, 128, 8, 2),
        128: AttentionTile(32, 64, 8, 2),
        256: AttentionTile(16, 32, 4, 1),
    },
    "backward_queries": {
        64: AttentionTile(128, 64, 8, 2),
        128: AttentionTile(64, 32, 4, 2),
        256: AttentionTile(32, 32, 4, 1),
    },
}
"""Of fp16 and bf16, causal or not."""

HALF_BOUNDED: _Tiles = {
    "forward": {64: AttentionTile(64, 64, 4, 3), 128: AttentionTile(64, 32, 4, 3), 256: AttentionTile(64, 32, 8, 2)},
    "backward_keys": {
        64: AttentionTile(32, 64, 8, 2),
        128: AttentionTile(32, 64, 8, 1),
        256: AttentionTile(16, 32, 4, 1),
    },
    "backward_queries": {
        64: AttentionTile(128, 64, 8, 2),
        128: AttentionTile(64, 32, 8, 2),
        256: AttentionTile(32, 32, 4, 1),
    },
}
"""The same with documents, a window or a soft cap, which take registers."""

FULL: _Tiles = {
    "forward": {64: AttentionTile(64, 32, 8, 2), 128: AttentionTile(32, 32, 8, 1), 256: AttentionTile(16, 16, 8, 1)},
    "backward_keys": {
        64: AttentionTile(32, 32, 8, 1),
        128: AttentionTile(16, 32, 8, 1),
        256: AttentionTile(16, 16, 8, 1),
    },
    "backward_queries": {
        64: AttentionTile(32, 16, 8, 1),
        128: AttentionTile(16, 16, 4, 1),
        256: AttentionTile(16, 16, 8, 1),
    },
}
"""Of fp32."""


def default_attention_tile(kernel: AttentionKernel, query: Tensor, *, bounded: bool) -> AttentionTile:
    """The tile for queries of that dtype and width; `bounded`: whether there are documents, a window or a soft cap."""
    table = FULL if query.dtype == torch.float32 else HALF_BOUNDED if bounded else HALF
    tile = next(tile for width, tile in table[kernel].items() if query.shape[-1] <= width)
    # ROCm's devices have 64 KiB of shared memory: three stages of heads of 128 would take 80.
    return replace(tile, stages=min(tile.stages, 2)) if torch.version.hip is not None else tile


def dot_precision(dtype: torch.dtype) -> str:
    """How products of fp32 matrices are computed: as torch's own, in tf32 only where it was allowed."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def row_block(width: int) -> int:
    """Numbers of a program that holds a whole row: the next power of two."""
    return 1 << (width - 1).bit_length()


def row_tile(width: int) -> RowTile:
    """The tile of such a program: 8 numbers or more for each thread, 16 warps at most in flight."""
    return RowTile(min(16, max(1, row_block(width) // 512)))


def cross_entropy_tile(vocab_size: int) -> BlockTile:
    """Of a row of logits that is read in blocks."""
    return BlockTile(min(4096, row_block(vocab_size)), 8)


ROTATION = RowTile(4)
"""Of all heads of a position."""


MOST_NORM_PROGRAMS = 256
"""Of a norm's backward pass, each of which writes a row of partial sums: one to three per multiprocessor."""
