"""Keys and values of earlier positions, kept so that generation computes each token once.

A cache belongs to a batch of sequences of any lengths. `extend` announces one forward pass over new tokens of each:

    cache = ContiguousCache(model.config, capacity=500, dtype=model.head_weight.dtype)
    hidden = model.hidden(prompt, cache=cache.extend(prompt.shape[1]))
    hidden = model.hidden(next_token, cache=cache.extend(1))

The pass tells the model the positions of its tokens; each attention layer passes it new keys and values and gets all
those that its queries may see. Keys are stored as they are compared: normed and rotated.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from napkin.errors import NapkinError
from napkin.kernels.attention.decode import Slots, reads_slots
from napkin.kernels.decoding.block_step import NewSlots
from napkin.model.config import ModelConfig
from napkin.model.recurrent_state import RecurrentStates, StatePass
from napkin.tensors import zeros_side_by_side

NewKeys = Float[Tensor, "batch kv_heads new head_dim"]
NewValues = Float[Tensor, "batch kv_heads new value_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Values = Float[Tensor, "batch kv_heads key value_dim"]

NOWHERE = 2**30
"""The position of a slot without a key: after every query, so that a causal mask hides it."""


SMALLEST_BUCKET = 16


def power_of_two(n: int, least: int = 1) -> int:
    """The power of two that n is rounded up to."""
    return max(least, 1 << (n - 1).bit_length())


def bucket_of(length: int, device: torch.device) -> int:
    """The length to which tokens or keys are padded: on a GPU, whose libraries prepare a kernel for each new shape, a
    power of two; on a CPU the length itself. A single token stays alone."""
    if device.type == "cpu" or length == 1:
        return length
    return power_of_two(length, SMALLEST_BUCKET)


class CachedPass:
    """One forward pass over new tokens of sequences whose earlier keys and values are kept."""

    start: int | None = None
    """The position of the first new token, if all sequences have the same, and positions count up from there."""
    positions: Int[Tensor, "batch_or_1 new"]
    """The positions of the new tokens; padding stands at any position of the model's."""
    document_positions: Int[Tensor, "batch_or_1 new"]
    """The positions of the new tokens in their documents: the same, if sequences are not packed."""
    states: StatePass | None = None
    """The states of layers that carry one; None where no layer does."""
    all_seen: bool = False
    """True if each query sees every key that `update` returns, as one new token of equally long sequences does."""

    def key_positions(self, layer: int) -> Int[Tensor, "batch_or_1 key"]:
        """The positions of the keys that `update` returns; NOWHERE for those that no query sees."""
        raise NotImplementedError

    def together(self, layer: int) -> Bool[Tensor, "batch_or_1 1 new key"] | None:
        """True for pairs in the same document or branch, which may see each other; None if positions alone decide."""
        return None

    def slots(self, layer: int) -> Slots | None:
        """The slots of the keys that one new token of each sequence sees, if they can be read where they are kept.

        `update` then returns the blocks that hold them: [block, kv_heads, slot, head_dim].
        """
        return None

    def slots_of_each(self) -> Slots | None:
        """The slots that each new token of sequences without windows sees, with its own as the last, row by row of
        [batch, new]; None where keys cannot be read in place."""
        return None

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The factors of a layer's keys and values in their blocks, if they are held as integers."""
        return None

    def new_slots(self, layer: int, scales: tuple[Tensor, Tensor] | None) -> NewSlots:
        """The slots that one new token of each sequence gets, where there are `slots`: a kernel that computes its keys
        and values puts them there."""
        raise NotImplementedError

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """The blocks of a layer's keys and values that `slots` numbers, for a loop that writes the new ones itself."""
        raise NotImplementedError

    def update(self, layer: int, keys: NewKeys, values: NewValues) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; return all that the queries may see."""
        raise NotImplementedError


class KVCache:
    """Keys and values of a batch of sequences in all layers; `extend` gives the next `CachedPass`.

    Of latent attention the keys are what all keys and values are made of, and the values are 0 numbers wide.
    """

    device: torch.device
    nbytes: int
    """Bytes of keys, values and states."""


class ContiguousCache(KVCache):
    """A cache with a fixed slot for each position: [batch, kv_heads, slot, head_dim] for each layer.

    `capacity` is the most tokens of a sequence; None is the context length. In layers with a sliding window the slots
    are a ring: position p is in slot p mod window, and no more than the window is stored; with `slack`, that many more,
    so that `truncate` can forget as many tokens. Layers that carry a state have it in place of slots.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int = 1,
        capacity: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        slack: int = 0,
    ) -> None:
        capacity = config.context_length if capacity is None else capacity
        if not 1 <= capacity <= config.context_length:
            raise NapkinError(
                f"a KV cache of {capacity} positions does not fit context_length {config.context_length}: use 1 to "
                f"{config.context_length}"
            )
        self.capacity, self.mixers = capacity, config.mixers
        self.lengths = [0] * batch_size
        windows = [window or capacity for window in config.attention_windows]
        self.slack = slack if min(windows) < capacity else 0
        self.n_slots = [min(window + self.slack, capacity) for window in windows]
        """Slots of a sequence in each layer."""
        heads, *widths = config.cached_widths
        # An extra slot takes what padding writes. Initialised to zeros, since hidden values are multiplied by 0, not
        # left out.
        attends = [mixer == "attention" for mixer in config.layer_mixers]
        makes = [source == layer for layer, source in enumerate(config.kv_sources)]
        held = [(n + 1) * (has and own) for n, has, own in zip(self.n_slots, attends, makes, strict=True)]
        shapes = [(batch_size, heads, n, width) for width in widths for n in held]
        both = zeros_side_by_side(shapes, dtype, device)
        self.keys, self.values = both[: len(held)], both[len(held) :]
        self.device = self.keys[0].device
        self.states = None if all(attends) else RecurrentStates(config, batch_size, dtype, self.device)
        self.nbytes = sum(tensor.nbytes for tensor in (*self.keys, *self.values))
        self.nbytes += 0 if self.states is None else self.states.nbytes
        self._documents: Documents | None = None

    def extend(
        self,
        n_new: int,
        counts: Sequence[int] | None = None,
        *,
        documents: Int[Tensor, "batch new"] | None = None,
    ) -> "ExtendingPass":
        """A pass over n_new tokens of each sequence, of which the first counts[b] are not padding; None is all.
        `documents` numbers their documents; None continues the last one. The lengths grow now: run the pass once.
        Raises NapkinError where a sequence would exceed the capacity.
        """
        counts = [n_new] * len(self.lengths) if counts is None else list(counts)
        before = self.grow(counts)
        if documents is not None and self._documents is None:
            self._documents = Documents(self)
        return ExtendingPass(self, before, counts, n_new, self._documents, documents)

    def grow(self, counts: Sequence[int]) -> list[int]:
        """Let each sequence have so many tokens more, whose keys and values another will write; the lengths before.
        Raises NapkinError where a sequence would exceed the capacity."""
        before = self.lengths
        after = [length + count for length, count in zip(before, counts, strict=True)]
        if max(after) > self.capacity:
            raise NapkinError(
                f"a sequence of {max(after)} tokens exceeds the {self.capacity} of its KV cache: make the cache with a "
                "larger capacity"
            )
        self.lengths = after
        return before

    @property
    def is_one_text(self) -> bool:
        """True for one sequence that is not divided into documents."""
        return len(self.lengths) == 1 and self._documents is None

    @property
    def is_read_in_place(self) -> bool:
        """True if all positions have slots of their own in all layers, of a size that a compiled loop reads there."""
        held = self.keys[0]
        whole = self.states is None and min(self.n_slots) == self.capacity
        return whole and reads_slots(held.dtype, held.device, held.shape[1] * held.shape[3])

    def branch(self, positions: Int[Tensor, " new"], sees: Bool[Tensor, "new new"]) -> "BranchingPass":
        """A pass over tokens that continue the sequence of a batch of one in several ways, and are not kept.

        Each has a position, and sees the cache and those new tokens that its row names.
        """
        self._refuse_many("branch")
        if self.states is not None:
            raise NapkinError(f"a sequence with a state of mixers '{self.mixers}' cannot branch: use a cache for each")
        return BranchingPass(self, positions, sees)

    def truncate(self, length: int) -> None:
        """Forget the tokens of a batch of one from position `length` on.

        If a ring has lost tokens that the one before `length` sees, or if there are states, from which no token can be
        removed, everything is forgotten: see `lengths`.
        """
        self._refuse_many("be truncated")
        (now,) = self.lengths
        if length < now:
            # Beyond slack, the next token would see one that a ring has lost; it overwrites the oldest itself.
            held = self.states is None and (now <= min(self.n_slots) or now - length <= self.slack + 1)
            self.lengths = [length if held else 0]

    def _refuse_many(self, what: str) -> None:
        if len(self.lengths) != 1 or self._documents is not None:
            raise NapkinError(f"only a KV cache of one sequence without documents can {what}: use one per sequence")


class ExtendingPass(CachedPass):
    """A pass that extends a `ContiguousCache`."""

    def __init__(
        self,
        cache: ContiguousCache,
        before: list[int],
        counts: list[int],
        n_new: int,
        kept_documents: "Documents | None" = None,
        documents: Int[Tensor, "batch new"] | None = None,
    ) -> None:
        self.cache, self.before, self.counts, self.n_new = cache, before, counts, n_new
        uniform = len(set(before)) == 1 and set(counts) == {n_new}
        self.start = before[0] if uniform else None
        self.all_seen = uniform and n_new == 1 and kept_documents is None and not cache.slack
        if uniform:
            self.positions = torch.arange(before[0], before[0] + n_new, device=cache.device)[None]
        else:
            starts = torch.tensor(before, device=cache.device)[:, None]
            self.positions = (starts + torch.arange(n_new, device=cache.device)).clamp(max=cache.capacity - 1)
        self._places = {n: _Places(self, n) for n in set(cache.n_slots)}
        self._kept_documents, self.document_positions = kept_documents, self.positions
        new_documents = document_before = None
        if kept_documents is not None:
            document_before = kept_documents.last[:, 0]
            new_documents, self.document_positions = kept_documents.extend(self, documents)
            self._documents = new_documents
        if cache.states is not None:
            rows = range(len(before))
            self.states = cache.states.extend(rows, before, counts, n_new, new_documents, document_before, at_once=True)

    @cached_property
    def n_real(self) -> Int[Tensor, "batch 1"]:
        """The number of tokens of each sequence that are not padding."""
        return torch.tensor(self.counts, device=self.cache.device)[:, None]

    @cached_property
    def real(self) -> Bool[Tensor, "batch new"]:
        """True for tokens that are not padding."""
        return torch.arange(self.n_new, device=self.cache.device) < self.n_real

    def key_positions(self, layer: int) -> Int[Tensor, "batch_or_1 key"]:
        """Positions of the stored keys, in the order of their slots, followed by those of the new keys if these are not
        stored."""
        return self._places[self.cache.n_slots[layer]].key_positions()

    def slots(self, layer: int) -> Slots | None:
        """The first slots, of as many as the sequence has tokens."""
        cache, held = self.cache, self.cache.keys[layer]
        if self.n_new != 1 or self._kept_documents is not None:
            return None
        if cache.slack and max(cache.lengths) > cache.n_slots[layer] - cache.slack:
            return None  # The ring may hold more than a window.
        if not reads_slots(held.dtype, held.device, held.shape[1] * held.shape[3]):
            return None
        n_seen = [max(1, min(length, cache.n_slots[layer])) for length in cache.lengths]
        rows = torch.arange(len(n_seen), device=cache.device)
        return Slots(torch.tensor(n_seen, device=cache.device), rows[:, None], max(n_seen))

    def slots_of_each(self) -> Slots | None:
        cache, held, start = self.cache, self.cache.keys[0], self.start
        if start is None or self._kept_documents is not None or min(cache.n_slots) < cache.capacity:
            return None
        if not reads_slots(held.dtype, held.device, held.shape[1] * held.shape[3]):
            return None
        rows = torch.arange(len(cache.lengths)).repeat_interleave(self.n_new)
        counts = torch.arange(start + 1, start + self.n_new + 1).repeat(len(cache.lengths))
        return Slots(counts, rows[:, None], start + self.n_new)

    def new_slots(self, layer: int, scales: tuple[Tensor, Tensor] | None) -> NewSlots:
        blocks, slots = self._places[self.cache.n_slots[layer]].indices
        return NewSlots(*self.held(layer), blocks[:, 0], slots[:, 0])

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.keys[layer], self.cache.values[layer]

    def together(self, layer: int) -> Bool[Tensor, "batch_or_1 1 new key"] | None:
        """True for queries and keys of one document."""
        if self._kept_documents is None:
            return None
        by_position, places = self._kept_documents.by_position, self.key_positions(layer)
        places = places.clamp(max=by_position.shape[1] - 1).expand(len(by_position), -1)
        return self._documents[:, None, :, None] == by_position.gather(1, places)[:, None, None, :]

    def update(self, layer: int, keys: NewKeys, values: NewValues) -> tuple[Keys, Values]:
        cache = self.cache
        slots = self._places[cache.n_slots[layer]]
        return slots.updated(cache.keys[layer], keys), slots.updated(cache.values[layer], values)


class _Places:
    """The places where a pass finds and puts keys, in layers with as many slots."""

    def __init__(self, extending: ExtendingPass, n_slots: int) -> None:
        self.extending, self.n_slots = extending, n_slots
        self.longest = max(extending.cache.lengths)
        # In a full ring, several new keys would overwrite those that the first of their queries still sees.
        self.in_place = self.longest <= n_slots or extending.n_new == 1

    def key_positions(self) -> Int[Tensor, "batch_or_1 key"]:
        positions = self.extending.positions
        if self.in_place:
            return _held_positions(self.extending.cache.lengths, self.n_slots, positions.device)[:, : self.longest]
        held = _held_positions(self.extending.before, self.n_slots, positions.device)
        new = positions.where(self.extending.real[: len(positions)], NOWHERE)
        return torch.cat((held.expand(len(positions), -1), new), dim=1)

    def updated(self, held: Tensor, new: Tensor) -> Tensor:
        """Put [batch, heads, new, width] into its slots; return all that the queries may see."""
        new = new.to(held.dtype)
        if not self.in_place:
            seen = torch.cat((held[:, :, :-1], new), dim=2)
            self._put(held, new)
            return seen
        if self.extending.start is None:
            self._put(held, new)
        else:
            slot = self.extending.start % self.n_slots
            held[:, :, slot : slot + self.extending.n_new] = new
        return held[:, :, : min(self.longest, self.n_slots)]

    def _put(self, held: Tensor, new: Tensor) -> None:
        """Keep what stays of each sequence when all have been put; padding goes to the slot beyond."""
        rows, slots = self.indices
        held[rows, :, slots] = new.transpose(1, 2)

    @cached_property
    def indices(self) -> tuple[Int[Tensor, "batch 1"], Int[Tensor, "batch new"]]:
        """The sequence and the slot of each new token."""
        positions, device = self.extending.positions, self.extending.positions.device
        after = torch.tensor(self.extending.cache.lengths, device=device)[:, None]
        stays = self.extending.real[: len(positions)] & (positions >= after - self.n_slots)
        slots = (positions % self.n_slots).where(stays, self.n_slots)
        rows = torch.arange(len(after), device=device)[:, None]
        return rows, slots.expand(len(after), -1)


def _held_positions(lengths: Sequence[int], n_slots: int, device: torch.device) -> Int[Tensor, "batch_or_1 slot"]:
    """The position in each slot of sequences of those lengths, or NOWHERE."""
    lengths = lengths if len(set(lengths)) > 1 else lengths[:1]
    last = torch.tensor(lengths, device=device)[:, None] - 1
    # The newest position of each slot; below 0 where the slot has none.
    positions = last - (last - torch.arange(n_slots, device=device)) % n_slots
    return positions.where(positions >= 0, NOWHERE)


class BranchingPass(CachedPass):
    """A pass over continuations of one sequence, see `ContiguousCache.branch`; the cache does not change."""

    def __init__(self, cache: ContiguousCache, positions: Int[Tensor, " new"], sees: Bool[Tensor, "new new"]) -> None:
        self.cache, self.sees = cache, sees
        self.positions = self.document_positions = positions[None]

    def key_positions(self, layer: int) -> Int[Tensor, "1 key"]:
        """Positions of the stored keys, then of the new ones."""
        held = _held_positions(self.cache.lengths, self.cache.n_slots[layer], self.positions.device)
        return torch.cat((held[:, : self._n_held(layer)], self.positions), dim=1)

    def together(self, layer: int) -> Bool[Tensor, "1 1 new key"]:
        """True for all stored keys, and for new tokens of the same branch."""
        held = self.sees.new_ones(len(self.sees), self._n_held(layer))
        return torch.cat((held, self.sees), dim=1)[None, None]

    def update(self, layer: int, keys: NewKeys, values: NewValues) -> tuple[Keys, Values]:
        n = self._n_held(layer)
        both = (self.cache.keys[layer], keys), (self.cache.values[layer], values)
        seen_keys, seen_values = (torch.cat((held[:, :, :n], new.to(held.dtype)), dim=2) for held, new in both)
        return seen_keys, seen_values

    def _n_held(self, layer: int) -> int:
        return min(self.cache.lengths[0], self.cache.n_slots[layer])


class Documents:
    """The documents of packed sequences in a `ContiguousCache`."""

    def __init__(self, cache: ContiguousCache) -> None:
        place = {"dtype": torch.int64, "device": cache.device}
        # Tokens before the first numbered ones count as a separate document. The extra place is for padding.
        self.by_position = torch.full((len(cache.lengths), cache.capacity + 1), -1, **place)
        self.last = torch.full((len(cache.lengths), 1), -1, **place)
        self.last_start = torch.zeros((len(cache.lengths), 1), **place)

    def extend(
        self, extending: ExtendingPass, documents: Int[Tensor, "batch new"] | None
    ) -> tuple[Int[Tensor, "batch new"], Int[Tensor, "batch new"]]:
        """Keep the documents of a pass's tokens, None goes on with the last one; these, and the positions in them."""
        documents = self.last.expand(-1, extending.n_new) if documents is None else documents
        positions = extending.positions.expand(len(documents), -1)
        changed = documents != torch.cat((self.last, documents[:, :-1]), dim=1)
        starts = torch.maximum(positions.where(changed, 0).cummax(dim=1).values, self.last_start)
        self.by_position.scatter_(1, positions.where(extending.real, extending.cache.capacity), documents)
        end, any_real = (extending.n_real - 1).clamp(min=0), extending.n_real > 0
        self.last = documents.gather(1, end).where(any_real, self.last)
        self.last_start = starts.gather(1, end).where(any_real, self.last_start)
        return documents, positions - starts
