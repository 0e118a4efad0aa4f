"""A KV cache in blocks: sequences of any lengths in one pool of fixed size, as they are computed or in int8.

Layers that carry a state have no blocks: a sequence that runs has a slot of fixed bytes for all of its states.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import psutil
import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from napkin.errors import NapkinError
from napkin.kernels.attention.decode import Slots, reads_slots
from napkin.kernels.decoding.block_step import NewSlots
from napkin.kernels.operators import triton_obstacle
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import NOWHERE, CachedPass, KVCache, NewKeys, NewValues, bucket_of
from napkin.model.recurrent_state import RecurrentStates
from napkin.model.transformer import Transformer
from napkin.tensors import sent_to
from napkin.units import format_bytes

KVFormat = Literal["auto", "int8"]
"""auto is the number format of the weights."""

FREE_SHARE = 0.5
"""Largest part of the free memory that a pool takes by default."""
_SCALE = torch.bfloat16
_LARGEST = 127

Seen = Float[Tensor, "batch kv_heads key head_dim"]
Places = Int[Tensor, "batch new"]
Table = Int[Tensor, "batch block"]


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, kv: KVFormat = "auto") -> int:
    """Bytes of one token's keys and values in all layers that have them."""
    if kv == "auto":
        return config.cached_numbers * dtype.itemsize
    heads, *widths = config.cached_widths
    return config.cached_numbers + config.n_kv_layers * heads * sum(map(bool, widths)) * _SCALE.itemsize


def state_bytes_per_sequence(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a sequence's states in all layers that carry one, however long the sequence is."""
    inputs = (config.conv_width - 1) * config.state_channels * dtype.itemsize
    sums = config.resolved_state_heads * config.state_size * config.state_head_dim
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return (config.n_layers - config.n_attention_layers) * (inputs + sums * wide)


def bytes_for(
    config: ModelConfig, dtype: torch.dtype, n_sequences: int, longest: int, block_size: int, kv: KVFormat = "auto"
) -> int:
    """Bytes of a cache for this many sequences of `longest` tokens, in whole blocks, with their states."""
    blocks = n_sequences * -(-longest // block_size) * block_size * bytes_per_token(config, dtype, kv)
    return blocks + n_sequences * state_bytes_per_sequence(config, dtype)


def n_blocks_that_fit(
    model: Transformer,
    block_bytes: int,
    block_size: int,
    max_running: int,
    cache_bytes: int | None,
    longest: int | None = None,
) -> int:
    """Blocks of a pool of cache_bytes; None is what max_running sequences of `longest` tokens need (None: of the
    context length), or a part of the free memory.

    The states of max_running sequences are a part of cache_bytes. Where no layer has keys and values, blocks hold
    nothing and are as many as are needed.
    """
    wanted = max_running * -(-(longest or model.config.context_length) // block_size)
    state_bytes = max_running * state_bytes_per_sequence(model.config, model.dtype)
    if cache_bytes is None:
        device = model.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        cache_bytes = min(wanted * block_bytes + state_bytes, int(FREE_SHARE * free))
    if state_bytes > cache_bytes:
        raise NapkinError(
            f"cache_bytes of {format_bytes(cache_bytes)} does not hold the states of {max_running} sequences, which "
            f"take {format_bytes(state_bytes)}: give more, or lower max_running"
        )
    n_blocks = (cache_bytes - state_bytes) // block_bytes if block_bytes else wanted
    if n_blocks < 1:
        raise NapkinError(
            f"cache_bytes of {format_bytes(cache_bytes)} holds no block of {block_size} tokens, which takes "
            f"{format_bytes(block_bytes)}: give more"
        )
    return n_blocks


class Blocks:
    """Blocks [block, kv_heads, slot, head_dim] for a layer's keys or values of some dtype.

    In int8 a vector of a token and head is q · scale, q from -127 to 127 and one scale in bf16: head_dim + 2 bytes in
    place of 2 · head_dim in bf16. A number is off by at most half a scale, 1/254 of the vector's largest.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, kv: KVFormat = "auto"
    ) -> None:
        self.dtype = dtype
        # Initialised to zeros, since hidden values are multiplied by 0, not left out.
        self.numbers = torch.zeros(shape, dtype=dtype if kv == "auto" else torch.int8, device=device)
        self.scales = (
            None if kv == "auto" or not shape[-1] else torch.zeros((*shape[:-1], 1), dtype=_SCALE, device=device)
        )
        self.tensors = [self.numbers] if self.scales is None else [self.numbers, self.scales]

    def put(self, blocks: Places, places: Places, new: NewKeys) -> None:
        """Keep those of new tokens in places of blocks."""
        rows = new.transpose(1, 2)
        if self.scales is None:
            self.numbers[blocks, :, places] = rows.to(self.numbers.dtype)
            return
        rows = rows.float()
        scales = (rows.abs().amax(-1, keepdim=True) / _LARGEST).to(_SCALE)
        # A vector of zeros has scale 0. The scale may have been rounded down: its largest number stays in range.
        whole = (rows / scales.float().clamp(min=torch.finfo(_SCALE).tiny)).round().clamp(-_LARGEST, _LARGEST)
        self.numbers[blocks, :, places] = whole.to(torch.int8)
        self.scales[blocks, :, places] = scales

    def seen(self, table: Table, longest: int) -> Seen:
        """The first `longest` of sequences that are in blocks table[b]."""
        blocks = self.numbers[table]
        if self.scales is not None:
            blocks = blocks.to(self.dtype) * self.scales[table].to(self.dtype)
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, :longest]


_SHAPE = "sequence_or_block kv_heads key "
Held = Float[Tensor, _SHAPE + "head_dim"] | Int8[Tensor, _SHAPE + "head_dim"]
HeldValues = Float[Tensor, _SHAPE + "value_dim"] | Int8[Tensor, _SHAPE + "value_dim"]


class PagedCache(KVCache):
    """Keys and values of n_blocks · block_size tokens, in blocks for each layer; `kv` is what they are held in.

    Layers with a state hold it for `n_states` sequences.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv: KVFormat = "auto",
        n_states: int = 1,
    ) -> None:
        self.block_size, self.device = block_size, torch.device(device)
        self.most_positions = config.context_length
        self.windows = config.attention_windows
        self.has_windows = any(window is not None for window in self.windows)
        self.padding_block = n_blocks
        """Takes what padding writes."""
        heads, *widths = config.cached_widths
        mixers = zip(config.layer_mixers, config.kv_sources, strict=True)
        attending = [layer for layer, (mixer, of) in enumerate(mixers) if mixer == "attention" and of == layer]
        self.keys, self.values = (
            {layer: Blocks((n_blocks + 1, heads, block_size, width), dtype, self.device, kv) for layer in attending}
            for width in widths
        )
        self.tensors = [tensor for held in (*self.keys.values(), *self.values.values()) for tensor in held.tensors]
        self.first = next(iter(self.keys.values()), None)
        """The keys of one layer, where any has them."""
        stateful = config.has_states
        self.states = RecurrentStates(config, n_states, dtype, self.device) if stateful else None
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        self.nbytes += 0 if self.states is None else self.states.nbytes

    def copy(self, blocks: Sequence[int], others: Sequence[int]) -> None:
        """Copy the contents of blocks[i] to others[i], in all layers."""
        of, to = (torch.tensor(each, device=self.device) for each in (blocks, others))
        for tensor in self.tensors:
            tensor[to] = tensor[of]

    def clear(self, blocks: Sequence[int]) -> None:
        """Keep zeros in blocks, in all layers."""
        places = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for tensor in self.tensors:
            tensor[places] = 0

    def extend(
        self,
        tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        counts: Sequence[int],
        n_new: int,
        *,
        states: Sequence[int] | None = None,
    ) -> "PagedPass":
        """A pass over n_new tokens of several sequences, of which the first counts[b] are not padding. tables[b] are
        the blocks of sequence b, which have room for them; lengths[b] of its tokens are in the cache. states[b] is the
        slot of its states, None is b; the new states are stored when `states.keep` is called.
        """
        after = [length + count for length, count in zip(lengths, counts, strict=True)]
        longest = max(after)
        # Keys that are read in place need no padding.
        n_keys = longest if self.reads_blocks(n_new) else bucket_of(longest, self.device)
        n_blocks = -(-n_keys // self.block_size)
        padding = [self.padding_block] * n_blocks
        padded = itertools.chain.from_iterable([*table, *padding][:n_blocks] for table in tables)
        # One copy to the device.
        numbers = sent_to(self.device, torch.tensor([*lengths, *after, *padded]))
        n = len(lengths)
        starts, ends, table = numbers[:n], numbers[n : 2 * n], numbers[2 * n :].view(n, n_blocks)
        alike = len(set(after)) == 1 and n_keys == longest
        extending = PagedPass(self, table, starts, ends, n_new, longest, n_keys, alike=alike)
        if self.states is not None:
            slots = range(len(tables)) if states is None else states
            extending.states = self.states.extend(slots, lengths, counts, n_new)
        return extending

    def extend_by_one(
        self, table: Int[Tensor, "batch block"], ends: Int[Tensor, " batch"], longest: int
    ) -> "PagedPass":
        """A pass over one new token of each sequence, all of whose numbers are on the device: ends[b] of its tokens are
        held then, `longest` at most."""
        return PagedPass(self, table, ends - 1, ends, 1, longest, longest, alike=False)

    def reads_blocks(self, n_new: int) -> bool:
        """True if so many new tokens of each sequence are compared with keys in their blocks."""
        if n_new != 1 or self.first is None:
            return False
        numbers = self.first.numbers
        if not reads_slots(numbers.dtype, numbers.device, numbers.shape[1] * numbers.shape[3]):
            return False
        # Only Triton's kernels support windows.
        return not self.has_windows or triton_obstacle(self.device.type) is None


class PagedPass(CachedPass):
    """A pass that extends sequences of a `PagedCache`, made of tensors on its device.

    starts[b] tokens of sequence b are held in blocks table[b], and ends[b] afterwards. Where keys are not read in their
    blocks, `n_keys` of each sequence are gathered. `longest` is the largest of the ends or more; `alike` says that all
    are equal to it.
    """

    def __init__(
        self,
        cache: PagedCache,
        table: Table,
        starts: Int[Tensor, " batch"],
        ends: Int[Tensor, " batch"],
        n_new: int,
        longest: int,
        n_keys: int,
        *,
        alike: bool,
    ) -> None:
        self.cache, self._table, self._ends, self._longest = cache, table, ends, n_keys
        size, n_blocks = cache.block_size, table.shape[1]
        positions = starts[:, None] + torch.arange(n_new, device=cache.device)
        real = positions < ends[:, None]
        new_blocks = table.gather(1, (positions // size).clamp(max=n_blocks - 1))
        self._new = new_blocks.where(real, cache.padding_block), positions % size
        self.positions = positions.clamp(max=cache.most_positions - 1)
        self.document_positions = self.positions
        self.all_seen = n_new == 1 and alike and not cache.has_windows
        self._slots = Slots(ends, table, longest) if cache.reads_blocks(n_new) else None

    def key_positions(self, layer: int) -> Int[Tensor, "batch key"]:
        """Positions of all cached keys, including the new ones."""
        positions = torch.arange(self._longest, device=self.cache.device)
        return positions.where(positions < self._ends[:, None], NOWHERE)

    def slots(self, layer: int) -> Slots | None:
        """The slots of a sequence, or the layer's window of them, if one new token per sequence is compared with keys
        in their blocks."""
        window = self.cache.windows[layer]
        return self._slots if self._slots is None or window is None else replace(self._slots, window=window)

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        keys, values = self.cache.keys[layer].scales, self.cache.values[layer].scales
        # The values of latent attention are in its keys.
        return None if keys is None else (keys, keys if values is None else values)

    def new_slots(self, layer: int, scales: tuple[Tensor, Tensor] | None) -> NewSlots:
        blocks, slots = self._new
        return NewSlots(*self.held(layer), blocks[:, 0], slots[:, 0], scales)

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.keys[layer].numbers, self.cache.values[layer].numbers

    def update(self, layer: int, keys: NewKeys, values: NewValues) -> tuple[Held, HeldValues]:
        return self._updated(self.cache.keys[layer], keys), self._updated(self.cache.values[layer], values)

    def _updated(self, held: Blocks, new: Tensor) -> Tensor:
        held.put(*self._new, new)
        return held.numbers if self._slots is not None else held.seen(self._table, self._longest)
