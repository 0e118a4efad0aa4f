"""The implementations of attention that a config can name: the same numbers, computed in different ways.

An implementation's `prepare` makes, once per step, what all layers share: the mask, or what replaces it. A call then
mixes the values of one layer. `length` counts the keys; the queries are the positions from `query_offset` on, all of
them unless keys and values of earlier positions are kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

import torch
from jaxtyping import Float, Int, Int8, Int32
from torch import Tensor

from napkin.kernels.attention.by_rows import compiled_attention, first_keys_of
from napkin.kernels.attention.decode import Slots, attend_to_slots
from napkin.kernels.attention.flash import document_bounds, flash_attention
from napkin.kernels.attention.reference import (
    flex_attention,
    fused_attention,
    plain_attention,
    softcap,
    softcapped_attention,
)
from napkin.model.kv_cache import CachedPass
from napkin.model.masks import CausalMask, SlidingWindowMask, additive_mask, additive_mask_at
from napkin.model.positions import NoPositions

Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch_or_block kv_heads key head_dim"] | Int8[Tensor, "batch_or_block kv_heads key head_dim"]
"""Int8 only with `Slots` that have scales."""
Documents = Int[Tensor, "batch position"] | None


class MaskedAttention:
    """Common part of implementations that are prepared by making a mask."""

    def __init__(self, n_heads: int, *, scale: float, sees: CausalMask) -> None:
        self.n_heads = n_heads
        self.scale = scale
        self.sees = sees

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; None is all before it."""
        return self.sees.size if isinstance(self.sees, SlidingWindowMask) else None

    def needs_mask(self, documents: Documents) -> bool:
        """True if pairs are hidden that the kernel does not hide by itself."""
        return True

    def prepare(
        self,
        positions: NoPositions,
        length: int,
        documents: Documents,
        device: torch.device,
        *,
        query_offset: int = 0,
    ) -> Any:
        """The mask; None where none is needed."""
        if not self.needs_mask(documents):
            return None
        return additive_mask(self.sees, positions, self.n_heads, length, documents, device, query_offset=query_offset)

    def prepare_cached(self, positions: NoPositions, cache: CachedPass, layer: int) -> Tensor | Slots | None:
        """The slots that new tokens see in a layer's cache, or their mask, if they need any."""
        biased = type(positions).bias is not NoPositions.bias
        if not biased and (slots := cache.slots(layer)) is not None:
            return slots
        together = cache.together(layer)
        first = cache.start == 0 and together is None and not self.needs_mask(None)
        if first or (cache.all_seen and not biased):
            return None
        query, key = cache.positions, cache.key_positions(layer)
        return additive_mask_at(self.sees, positions, self.n_heads, query, key, together)


class PlainAttention(MaskedAttention):
    """Matrix products and a softmax; it holds the scores of all pairs.

    Scores and weights have the dtype of queries and keys; the softmax sums in fp32.
    """

    def __init__(self, n_heads: int, *, scale: float, sees: CausalMask, softcap: float | None = None) -> None:
        super().__init__(n_heads, scale=scale, sees=sees)
        self.softcap = softcap

    def __call__(self, queries: Queries, keys: Keys, values: Keys, prepared: Any) -> Queries:
        if isinstance(prepared, Slots):
            return attend_to_slots(queries, keys, values, prepared, self.scale, self.softcap)
        if self.softcap is None:
            return plain_attention(queries, keys, values, prepared, self.scale)
        return softcapped_attention(queries, keys, values, prepared, self.scale, self.softcap)


class FusedAttention(MaskedAttention):
    """torch's scaled_dot_product_attention, causal: it holds no scores."""

    def needs_mask(self, documents: Documents) -> bool:
        """Only if documents have to be kept apart."""
        return documents is not None

    def __call__(self, queries: Queries, keys: Keys, values: Keys, prepared: Any) -> Queries:
        if isinstance(prepared, Slots):
            return attend_to_slots(queries, keys, values, prepared, self.scale)
        return fused_attention(queries, keys, values, prepared, self.scale)


class MaskedFusedAttention(FusedAttention):
    """`FusedAttention` for windows and biased scores, with a mask; it computes hidden pairs too."""

    def needs_mask(self, documents: Documents) -> bool:
        return True


@dataclass(frozen=True)
class FlashBlocks:
    """State that the layers share in a pass of flash attention."""

    bounds: Int32[Tensor, "2 batch position"] | None
    """The bounds of each token's document, as `napkin.kernels.attention.flash.document_bounds` makes them; None is one
    document."""
    query_offset: int


class FlashAttention(PlainAttention):
    """napkin's FlashAttention-2, in Triton on a GPU: it holds no scores, and skips blocks of pairs that are hidden.

    With a cache of keys and values it is plain attention.
    """

    def prepare(
        self,
        positions: NoPositions,
        length: int,
        documents: Documents,
        device: torch.device,
        *,
        query_offset: int = 0,
    ) -> FlashBlocks:
        """The bounds of documents, instead of a mask."""
        return FlashBlocks(None if documents is None else document_bounds(documents), query_offset)

    def __call__(self, queries: Queries, keys: Keys, values: Keys, prepared: Any) -> Queries:
        if not isinstance(prepared, FlashBlocks):
            return super().__call__(queries, keys, values, prepared)
        return flash_attention(
            queries,
            keys,
            values,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            bounds=prepared.bounds,
            query_offset=prepared.query_offset,
        )


class FirstKeys(NamedTuple):
    """State that the layers share in a pass of compiled attention."""

    of_queries: Int[Tensor, "batch_or_1 query"]


class CompiledAttention(PlainAttention):
    """napkin's attention by blocks of queries, compiled for a CPU: it holds some MB of scores, and no mask.

    With a cache of keys and values, and on a GPU, it is plain attention.
    """

    def prepare(
        self,
        positions: NoPositions,
        length: int,
        documents: Documents,
        device: torch.device,
        *,
        query_offset: int = 0,
    ) -> FirstKeys:
        """The first key that each query sees, instead of a mask."""
        return FirstKeys(first_keys_of(documents, self.window, length, query_offset, device))

    def __call__(self, queries: Queries, keys: Keys, values: Keys, prepared: Any) -> Queries:
        if not isinstance(prepared, FirstKeys):
            return super().__call__(queries, keys, values, prepared)
        (first_keys,) = prepared
        return compiled_attention(queries, keys, values, self.scale, first_keys=first_keys, softcap=self.softcap)


class FlexAttention(PlainAttention):
    """torch's flex_attention, compiled for a GPU: it holds no scores and skips blocks of pairs that are all hidden.

    torch has no backward pass of it on a CPU: there this is plain attention.
    """

    def prepare(
        self,
        positions: NoPositions,
        length: int,
        documents: Documents,
        device: torch.device,
        *,
        query_offset: int = 0,
    ) -> Any:
        """The blocks of pairs to compute, and what changes their scores; on a CPU the mask."""
        if device.type == "cpu":
            return super().prepare(positions, length, documents, device, query_offset=query_offset)
        return self.prepare_kernel(positions, length, documents, device, query_offset=query_offset)

    def __call__(
        self,
        queries: Queries,
        keys: Keys,
        values: Keys,
        prepared: Any,
        *,
        kernel: Callable[..., Tensor] | None = None,
    ) -> Queries:
        """Mix the values by their weights; `kernel` replaces the compiled kernel."""
        if prepared is None or isinstance(prepared, (Tensor, Slots)):
            return super().__call__(queries, keys, values, prepared)
        score_mod, block_mask = prepared
        return flex_attention(queries, keys, values, score_mod, block_mask, self.scale, kernel=kernel)

    def prepare_kernel(
        self,
        positions: NoPositions,
        length: int,
        documents: Documents,
        device: torch.device,
        *,
        query_offset: int = 0,
    ) -> Any:
        """The rules as functions of one pair, which the compiler builds into its kernel."""
        from torch.nn.attention.flex_attention import create_block_mask

        # The compiler reads these functions: no decorator may wrap them, not even the type checks of the tests.
        @no_type_check
        def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            capped = score if self.softcap is None else softcap(score, self.softcap)
            return capped + positions.bias(head, query + query_offset - key)

        @no_type_check
        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(query + query_offset, key)

        @no_type_check
        def sees_in_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            assert documents is not None
            query = query + query_offset
            return self.sees(query, key) & (documents[batch, query] == documents[batch, key])

        n_batches = None if documents is None else len(documents)
        rule = sees if documents is None else sees_in_document
        return score_mod, create_block_mask(rule, n_batches, None, length - query_offset, length, device=device)
