"""What the blocks of a KV cache hold: keys or values of a layer as they are computed, or in int8.

In int8 a vector of a token and head is q · scale, q from -127 to 127 and one scale in bf16: head_dim + 2 bytes in place
of 2 · head_dim in bf16. A number is off by at most half a scale, 1/254 of the vector's largest.
"""

from typing import Literal

import psutil
import torch
from jaxtyping import Float, Int
from torch import Tensor

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import NewKeys
from napkin.model.transformer import Transformer
from napkin.units import format_bytes

KVFormat = Literal["auto", "int8"]
"""auto is the number format of the weights."""

FREE_SHARE = 0.5
"""Of the memory that is free, what a pool takes at most by default."""
_SCALE = torch.bfloat16
_LARGEST = 127

Seen = Float[Tensor, "batch kv_heads key head_dim"]
Places = Int[Tensor, "batch new"]
Table = Int[Tensor, "batch block"]


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, kv: KVFormat = "auto") -> int:
    """Of the keys and values of one token in all layers."""
    width = config.resolved_head_dim
    of_head = width * dtype.itemsize if kv == "auto" else width + _SCALE.itemsize
    return 2 * config.n_layers * config.resolved_n_kv_heads * of_head


def n_blocks_that_fit(
    model: Transformer, block_bytes: int, block_size: int, max_running: int, cache_bytes: int | None
) -> int:
    """Blocks of a pool of cache_bytes; None is what max_running sequences need, or a part of the free memory."""
    wanted = max_running * -(-model.config.context_length // block_size)
    if cache_bytes is None:
        device = model.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        cache_bytes = min(wanted * block_bytes, int(FREE_SHARE * free))
    n_blocks = cache_bytes // block_bytes
    if n_blocks < 1:
        raise NapkinError(
            f"cache_bytes of {format_bytes(cache_bytes)} holds no block of {block_size} tokens, which takes "
            f"{format_bytes(block_bytes)}: give more"
        )
    return n_blocks


def make_blocks(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, kv: KVFormat
) -> "PlainBlocks | Int8Blocks":
    """Blocks [block, kv_heads, slot, head_dim] for a layer's keys or values of some dtype."""
    return PlainBlocks(shape, dtype, device) if kv == "auto" else Int8Blocks(shape, dtype, device)


class PlainBlocks:
    """Numbers as they are computed."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        # Zeros, since what is hidden is multiplied by 0, not left out.
        self.numbers = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return self.numbers.nbytes

    def put(self, blocks: Places, places: Places, new: NewKeys) -> None:
        """Keep those of new tokens in places of blocks."""
        self.numbers[blocks, :, places] = new.transpose(1, 2).to(self.numbers.dtype)

    def copy(self, blocks: Int[Tensor, " n"], others: Int[Tensor, " n"]) -> None:
        """Keep in others[i] what blocks[i] holds."""
        self.numbers[others] = self.numbers[blocks]

    def clear(self, blocks: Int[Tensor, " n"]) -> None:
        """Keep zeros in blocks."""
        self.numbers[blocks] = 0

    def seen(self, table: Table, longest: int) -> Seen:
        """The first `longest` of sequences that are in blocks table[b]."""
        return _joined(self.numbers[table], longest)


class Int8Blocks:
    """Numbers as q · scale."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.numbers = torch.zeros(shape, dtype=torch.int8, device=device)
        self.scales = torch.zeros((*shape[:-1], 1), dtype=_SCALE, device=device)

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return self.numbers.nbytes + self.scales.nbytes

    def put(self, blocks: Places, places: Places, new: NewKeys) -> None:
        """Keep those of new tokens in places of blocks."""
        rows = new.transpose(1, 2).float()
        scales = (rows.abs().amax(-1, keepdim=True) / _LARGEST).to(_SCALE)
        # A vector of zeros has scale 0. The scale may have been rounded down: its largest number stays in range.
        whole = (rows / scales.float().clamp(min=torch.finfo(_SCALE).tiny)).round().clamp(-_LARGEST, _LARGEST)
        self.numbers[blocks, :, places] = whole.to(torch.int8)
        self.scales[blocks, :, places] = scales

    def copy(self, blocks: Int[Tensor, " n"], others: Int[Tensor, " n"]) -> None:
        """Keep in others[i] what blocks[i] holds."""
        self.numbers[others] = self.numbers[blocks]
        self.scales[others] = self.scales[blocks]

    def clear(self, blocks: Int[Tensor, " n"]) -> None:
        """Keep zeros in blocks."""
        self.numbers[blocks] = 0
        self.scales[blocks] = 0

    def seen(self, table: Table, longest: int) -> Seen:
        """The first `longest` of sequences that are in blocks table[b]."""
        return _joined(self.numbers[table].to(self.dtype) * self.scales[table].to(self.dtype), longest)


def _joined(blocks: Float[Tensor, "batch block kv_heads slot head_dim"], longest: int) -> Seen:
    return blocks.transpose(1, 2).flatten(2, 3)[:, :, :longest]
