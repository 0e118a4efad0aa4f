"""A KV cache in blocks: sequences of any lengths in one pool of fixed size, see `napkin.inference.block_pool`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from napkin.inference.kv_blocks import Int8Blocks, KVFormat, PlainBlocks, make_blocks
from napkin.kernels.decoding import Slots, reads_slots
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import NOWHERE, NewKeys

_SHAPE = "sequence_or_block kv_heads key head_dim"
Held = Float[Tensor, _SHAPE] | Int8[Tensor, _SHAPE]


class PagedCache:
    """Keys and values of n_blocks · block_size tokens, in blocks for each layer; `kv` is what they are held in."""

    def __init__(
        self,
        config: ModelConfig,
        n_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv: KVFormat = "auto",
    ) -> None:
        self.block_size, self.device = block_size, torch.device(device)
        self.most_positions = config.context_length
        self.has_windows = any(window is not None for window in config.attention_windows)
        self.padding_block = n_blocks
        """Takes what padding writes."""
        shape = (n_blocks + 1, config.resolved_n_kv_heads, block_size, config.resolved_head_dim)
        self.keys = [make_blocks(shape, dtype, self.device, kv) for _ in range(config.n_layers)]
        self.values = [make_blocks(shape, dtype, self.device, kv) for _ in range(config.n_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(blocks.nbytes for blocks in (*self.keys, *self.values))

    def copy(self, blocks: Sequence[int], others: Sequence[int]) -> None:
        """Keep in others[i] what blocks[i] holds, in all layers."""
        places = [torch.tensor(each, device=self.device) for each in (blocks, others)]
        for held in (*self.keys, *self.values):
            held.copy(*places)

    def clear(self, blocks: Sequence[int]) -> None:
        """Keep zeros in blocks, in all layers."""
        places = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for held in (*self.keys, *self.values):
            held.clear(places)

    def extend(
        self, tables: Sequence[Sequence[int]], lengths: Sequence[int], counts: Sequence[int], n_new: int
    ) -> "PagedPass":
        """A pass over n_new tokens of several sequences, of which the first counts[b] are no padding.

        tables[b] are the blocks of sequence b, which have room for them; lengths[b] of its tokens are held.
        """
        return PagedPass(self, tables, lengths, counts, n_new)


class PagedPass:
    """A pass that extends sequences of a `PagedCache`: a `napkin.model.kv_cache.CachedPass`."""

    start = None

    def __init__(
        self,
        cache: PagedCache,
        tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        counts: Sequence[int],
        n_new: int,
    ) -> None:
        self.cache = cache
        size, device = cache.block_size, cache.device
        after = [length + count for length, count in zip(lengths, counts, strict=True)]
        self._longest = max(after)
        n_blocks = -(-self._longest // size)
        padding = [cache.padding_block] * n_blocks
        self._table = torch.tensor([[*table, *padding][:n_blocks] for table in tables], device=device)
        self._ends = torch.tensor(after, device=device)
        starts = torch.tensor(lengths, device=device)[:, None]
        positions = starts + torch.arange(n_new, device=device)
        real = positions < self._ends[:, None]
        new_blocks = self._table.gather(1, (positions // size).clamp(max=n_blocks - 1))
        self._new = new_blocks.where(real, cache.padding_block), positions % size
        self.positions: Int[Tensor, "batch new"] = positions.clamp(max=cache.most_positions - 1)
        self.document_positions = self.positions
        self.all_seen = n_new == 1 and len(set(after)) == 1 and not cache.has_windows
        self._slots = None
        if n_new == 1 and not cache.has_windows and _reads_slots(cache.keys[0]):
            self._slots = Slots(self._ends, self._table, self._longest)

    def key_positions(self, layer: int) -> Int[Tensor, "batch key"]:
        """Of what is held, the new ones among them."""
        positions = torch.arange(self._longest, device=self.cache.device)
        return positions.where(positions < self._ends[:, None], NOWHERE)

    def together(self, layer: int) -> None:
        """Positions decide alone."""
        return

    def slots(self, layer: int) -> Slots | None:
        """All that a sequence holds, where one new token of each is compared with keys in their blocks."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self._slots is not None and isinstance(keys, Int8Blocks) and isinstance(values, Int8Blocks):
            return replace(self._slots, scales=(keys.scales, values.scales))
        return self._slots

    def update(self, layer: int, keys: NewKeys, values: NewKeys) -> tuple[Held, Held]:
        """Keep a layer's new keys and values; return all that the queries may see."""
        return self._updated(self.cache.keys[layer], keys), self._updated(self.cache.values[layer], values)

    def _updated(self, held: PlainBlocks | Int8Blocks, new: Tensor) -> Tensor:
        held.put(*self._new, new)
        return held.numbers if self._slots is not None else held.seen(self._table, self._longest)


def _reads_slots(held: PlainBlocks | Int8Blocks) -> bool:
    """Whether attention reads keys where they are kept."""
    numbers = held.numbers
    return reads_slots(numbers.dtype, numbers.device, numbers.shape[1] * numbers.shape[3])
