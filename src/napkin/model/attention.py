"""Self-attention, multi-head, grouped-query or multi-query: softmax(q · kᵀ / sqrt(head_dim)) · v under a mask.

A config names an implementation: the same numbers, computed in different ways. Its `prepare` makes, once per step, what
all layers share: the mask, or what replaces it. A call then mixes the values of one layer.

A mask is a rule about positions, a function of tensors of any shape, so that a matrix and a compiled kernel can both be
made from it. Functions that a kernel's compiler reads are exempt from the type checks that tests enforce.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, no_type_check

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Int8, Int32
from torch import Tensor, nn

from napkin.errors import NapkinError
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
from napkin.kernels.pointwise.rotary import COMPILED_ROTATIONS, FUSED_ROTATIONS, rotate_halves
from napkin.model.kv_cache import CachedPass
from napkin.model.layers import Device, LinearFactory
from napkin.model.norm import NoQKNorm
from napkin.model.positions import PAIRINGS, NoPositions, RotaryEmbedding, Rotation

Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch_or_block kv_heads key head_dim"] | Int8[Tensor, "batch_or_block kv_heads key head_dim"]
"""Int8 only with `Slots` that have scales."""
Values = Float[Tensor, "batch_or_block kv_heads key value_dim"] | Int8[Tensor, "batch_or_block kv_heads key value_dim"]
Mixed = Float[Tensor, "batch heads query value_dim"]
Documents = Int[Tensor, "batch position"] | None

HIDDEN = -30000.0
"""Added to a score it makes a weight of exactly 0 beside any seen key; a number of every format, fp16 among them."""


class SharedKeysAndValues:
    """The keys and values of a layer in one forward pass, for those after it that share them.

    With a cache they are what it holds.
    """

    def __init__(self) -> None:
        self.held: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class ForwardContext:
    """State that all layers share in one forward pass."""

    rotation: Rotation = ()
    """The cosines and sines by which queries and keys are rotated."""
    mask: Any = None
    """The result of the layer's `Preparation`; for attention the mask, which says which tokens see each other."""
    cache: CachedPass | None = None
    """Keys and values of earlier positions, and states; None in training."""
    layer: int = 0
    """The layer that these keys and values belong to."""
    shared: SharedKeysAndValues | None = None
    """Storage of the keys and values that layers of a group share; None if none are shared."""


class Preparation(Protocol):
    """Makes, once per step, what all layers of a kind share: an attention implementation, or `DocumentsOnly`."""

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        """Prepare for sequences of `length` tokens."""
        ...

    def prepare_cached(self, positions: NoPositions, cache: CachedPass, layer: int) -> Any:
        """Prepare for new tokens of sequences in a cache."""
        ...


class DocumentsOnly:
    """Layers with a state need no mask, and the documents of packed tokens."""

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Documents:
        """The documents themselves."""
        return documents

    def prepare_cached(self, positions: NoPositions, cache: CachedPass, layer: int) -> None:
        """Nothing: the cache's states know the documents."""


DOCUMENTS_ONLY = DocumentsOnly()


class CausalSelfAttention(nn.Module):
    """Attention of each position to itself and those before it (Vaswani et al. 2017).

    Query head h reads key and value head h // (n_heads / n_kv_heads) (Ainslie et al. 2023). `attend` is the attention
    implementation; `qk_norm` acts on queries and keys before `rotate`. By itself the layer is causal and has rotary
    positions:

    >>> import torch
    >>> CausalSelfAttention(64, 4)(torch.zeros(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    A model makes the `ForwardContext` once per step instead, for all its layers.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        attend: "PlainAttention | None" = None,
        rotate: Callable[..., Tensor] = rotate_halves,
        qk_norm: nn.Module | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        linears: LinearFactory | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if head_dim is None and d_model % n_heads:
            raise NapkinError(
                f"d_model {d_model} does not divide into n_heads {n_heads}: use a divisor, or set head_dim"
            )
        if n_heads % n_kv_heads:
            raise NapkinError(
                f"n_heads {n_heads} does not divide into n_kv_heads {n_kv_heads} groups: use a divisor of {n_heads}"
            )
        linears = (linears or LinearFactory()).on(device, dtype)
        head_dim = head_dim or d_model // n_heads
        self.head_dim = head_dim
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.attend = attend or FusedAttention(n_heads, scale=head_dim**-0.5, sees=CausalMask())
        self.rotate = rotate
        widths = (n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim)
        self.query_key_value = linears.linear(d_model, *widths, bias=qkv_bias)
        self.qk_norm = qk_norm or NoQKNorm()
        self.output = linears.residual_output(n_heads * head_dim, d_model, bias=output_bias)

    def forward(
        self, x: Float[Tensor, "batch position d_model"], context: ForwardContext | None = None
    ) -> Float[Tensor, "batch position d_model"]:
        """Attend, with the rotation and mask of `context`; without one, from position 0 in one document."""
        context = own_context(self, x, self.head_dim) if context is None else context
        n_queries_and_keys = self.n_heads + self.n_kv_heads
        heads = rearrange(self.query_key_value(x), "b t (h c) -> b t h c", h=n_queries_and_keys + self.n_kv_heads)
        queries_and_keys, values = heads.split((n_queries_and_keys, self.n_kv_heads), dim=2)
        rotated = self.rotate(self.qk_norm(queries_and_keys), *context.rotation)
        queries, keys = rotated.split((self.n_heads, self.n_kv_heads), dim=2)
        queries, keys, values = (rearrange(part, "b t h c -> b h t c") for part in (queries, keys, values))
        if context.cache is not None:
            keys, values = context.cache.update(context.layer, keys, values)
        if context.shared is not None:
            context.shared.held = keys, values
        mixed = self.attend(queries, keys, values, context.mask)
        return self.output(rearrange(mixed, "b h t c -> b t (h c)"))


class SharedAttention(nn.Module):
    """Attention to the keys and values of an earlier layer, with queries of its own (Brandon et al. 2024).

    `qk_norm` is the norm of queries alone. The context has the keys and values: see `SharedKeysAndValues`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        head_dim: int,
        attend: "PlainAttention",
        rotate: Callable[..., Tensor],
        qk_norm: nn.Module,
        query_bias: bool,
        output_bias: bool,
        linears: LinearFactory,
    ) -> None:
        super().__init__()
        self.head_dim, self.n_heads = head_dim, n_heads
        self.attend, self.rotate = attend, rotate
        self.query = linears.linear(d_model, n_heads * head_dim, bias=query_bias)
        self.qk_norm = qk_norm
        self.output = linears.residual_output(n_heads * head_dim, d_model, bias=output_bias)

    def forward(
        self, x: Float[Tensor, "batch position d_model"], context: ForwardContext | None = None
    ) -> Float[Tensor, "batch position d_model"]:
        """Attend to what the context has of an earlier layer."""
        held = None if context is None or context.shared is None else context.shared.held
        if context is None or held is None:
            raise NapkinError(
                "this layer shares the keys and values of an earlier one, which has not run: run the whole model, or a "
                "part of it that begins with the first of the layers that share them"
            )
        heads = rearrange(self.query(x), "b t (h c) -> b t h c", h=self.n_heads)
        queries = rearrange(self.rotate(self.qk_norm(heads), *context.rotation), "b t h c -> b h t c")
        mixed = self.attend(queries, *held, context.mask)
        return self.output(rearrange(mixed, "b h t c -> b t (h c)"))


def own_context(layer: Any, x: Float[Tensor, "batch position d_model"], rotated_dim: int) -> ForwardContext:
    """The context of an attention layer by itself: from position 0 in one document."""
    length = x.shape[1]
    rotation: Rotation = ()
    for pairing, (rotate, _) in PAIRINGS.items():
        if layer.rotate in (rotate, COMPILED_ROTATIONS[rotate], FUSED_ROTATIONS[rotate]):
            with x.device:
                rotation = RotaryEmbedding(rotated_dim, length, pairing=pairing)(length)
    return ForwardContext(rotation, layer.attend.prepare(NoPositions(), length, None, x.device))


class CausalMask:
    """A token sees itself and all tokens before it."""

    @no_type_check
    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """True where the query at one position sees the key at another."""
        return key <= query


class SlidingWindowMask(CausalMask):
    """A token sees itself and the size - 1 tokens before it (Beltagy et al. 2020)."""

    def __init__(self, size: int) -> None:
        self.size = size

    @no_type_check
    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < self.size)


class PlainAttention:
    """Matrix products and a softmax, which holds the scores of all pairs; and the base of all implementations.

    Scores and weights have the dtype of queries and keys; the softmax sums in fp32.
    """

    one_width: ClassVar[bool] = False
    """True if values have to be as wide as queries and keys."""

    def __init__(self, n_heads: int, *, scale: float, sees: CausalMask, softcap: float | None = None) -> None:
        self.n_heads = n_heads
        self.scale = scale
        self.sees = sees
        self.softcap = softcap

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; None is all before it."""
        return self.sees.size if isinstance(self.sees, SlidingWindowMask) else None

    def needs_mask(self, positions: NoPositions, documents: Documents) -> bool:
        """True if pairs are hidden or scores changed in ways that the kernel does not know."""
        return True

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        """The mask for queries and keys of `length` positions; None where none is needed."""
        if not self.needs_mask(positions, documents):
            return None
        query, key = torch.arange(length, device=device), torch.arange(length, device=device)
        together = None if documents is None else documents[:, None, :, None] == documents[:, None, None, :]
        return additive_mask_of(self.sees, positions, self.n_heads, query, key, together)

    def prepare_cached(self, positions: NoPositions, cache: CachedPass, layer: int) -> Tensor | Slots | None:
        """The slots that new tokens see in a layer's cache, or their mask, if they need any."""
        if not positions.has_bias and (slots := cache.slots(layer)) is not None:
            return slots
        together = cache.together(layer)
        first = cache.start == 0 and together is None and not self.needs_mask(positions, None)
        if first or (cache.all_seen and not positions.has_bias):
            return None
        query, key = cache.positions, cache.key_positions(layer)
        return additive_mask_at(self.sees, positions, self.n_heads, query, key, together)

    def __call__(self, queries: Queries, keys: Keys, values: Values, prepared: Any) -> Mixed:
        if isinstance(prepared, Slots):
            return attend_to_slots(queries, keys, values, prepared, self.scale, self.softcap)
        if self.softcap is None:
            return plain_attention(queries, keys, values, prepared, self.scale)
        return softcapped_attention(queries, keys, values, prepared, self.scale, self.softcap)


class FusedAttention(PlainAttention):
    """torch's scaled_dot_product_attention, causal: it holds no scores.

    With documents, windows and biased scores it takes a mask, and computes hidden pairs too.
    """

    def needs_mask(self, positions: NoPositions, documents: Documents) -> bool:
        return documents is not None or self.window is not None or positions.has_bias

    def __call__(self, queries: Queries, keys: Keys, values: Values, prepared: Any) -> Mixed:
        if isinstance(prepared, Slots):
            return attend_to_slots(queries, keys, values, prepared, self.scale)
        return fused_attention(queries, keys, values, prepared, self.scale)


class FlashBounds(NamedTuple):
    """The bounds of each token's document, as `document_bounds` makes them; None is one document."""

    bounds: Int32[Tensor, "2 batch position"] | None


class FlashAttention(PlainAttention):
    """napkin's FlashAttention-2, in Triton on a GPU: it holds no scores, and skips blocks of pairs that are hidden.

    With a cache of keys and values it is plain attention.
    """

    one_width = True

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> FlashBounds:
        return FlashBounds(None if documents is None else document_bounds(documents))

    def __call__(self, queries: Queries, keys: Keys, values: Values, prepared: Any) -> Mixed:
        if not isinstance(prepared, FlashBounds):
            return super().__call__(queries, keys, values, prepared)
        (bounds,) = prepared
        settings = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return flash_attention(queries, keys, values, bounds=bounds, query_offset=0, **settings)


class FirstKeys(NamedTuple):
    """The first key that each query sees."""

    of_queries: Int[Tensor, "batch_or_1 query"]


class CompiledAttention(PlainAttention):
    """napkin's attention by blocks of queries, compiled for a CPU: it holds some MB of scores, and no mask.

    With a cache of keys and values, and on a GPU, it is plain attention.
    """

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> FirstKeys:
        return FirstKeys(first_keys_of(documents, self.window, length, 0, device))

    def __call__(self, queries: Queries, keys: Keys, values: Values, prepared: Any) -> Mixed:
        if not isinstance(prepared, FirstKeys):
            return super().__call__(queries, keys, values, prepared)
        (first_keys,) = prepared
        return compiled_attention(queries, keys, values, self.scale, first_keys=first_keys, softcap=self.softcap)


class FlexAttention(PlainAttention):
    """torch's flex_attention, compiled for a GPU: it holds no scores and skips blocks of pairs that are all hidden.

    torch has no backward pass of it on a CPU: there this is plain attention.
    """

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        prepare = super().prepare if device.type == "cpu" else self.prepare_kernel
        return prepare(positions, length, documents, device)

    def __call__(
        self,
        queries: Queries,
        keys: Keys,
        values: Values,
        prepared: Any,
        *,
        kernel: Callable[..., Tensor] | None = None,
    ) -> Mixed:
        """Mix the values by their weights; `kernel` replaces the compiled kernel."""
        if prepared is None or isinstance(prepared, (Tensor, Slots)):
            return super().__call__(queries, keys, values, prepared)
        score_mod, block_mask = prepared
        return flex_attention(queries, keys, values, score_mod, block_mask, self.scale, kernel=kernel)

    def prepare_kernel(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        """The rules as functions of one pair, which the compiler builds into its kernel, and the blocks to compute."""
        from torch.nn.attention.flex_attention import create_block_mask

        # The compiler reads these functions: no decorator may wrap them, not even the type checks of the tests.
        @no_type_check
        def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            capped = score if self.softcap is None else softcap(score, self.softcap)
            return capped + positions.bias(head, query - key)

        @no_type_check
        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(query, key)

        @no_type_check
        def sees_in_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(query, key) & (documents[batch, query] == documents[batch, key])  # pyright: ignore[reportOptionalSubscript]

        n_batches = None if documents is None else len(documents)
        rule = sees if documents is None else sees_in_document
        return score_mod, create_block_mask(rule, n_batches, None, length, length, device=device)


ATTENTION_IMPLEMENTATIONS: dict[str, type[PlainAttention]] = {
    "plain": PlainAttention,
    "sdpa": FusedAttention,
    "flex": FlexAttention,
    "flash": FlashAttention,
    "compiled": CompiledAttention,
}


def additive_mask_of(
    sees: CausalMask,
    positions: NoPositions,
    n_heads: int,
    query: Int[Tensor, " query"],
    key: Int[Tensor, " key"],
    together: Bool[Tensor, "batch 1 query key"] | None,
) -> Float[Tensor, "*batch_and_heads query key"]:
    """The mask that is added to the scores [batch, head, query, key]: the positions' bias where a key is seen, else
    -infinity; where `together` is False, a key is not seen.

    Four dimensions, or two if it is the same for all sequences and heads.
    """
    seen = sees(query[:, None], key)
    if together is not None:
        seen = seen & together
    heads = torch.arange(n_heads, device=query.device)[None, :, None, None]
    return positions.bias(heads, query[:, None] - key).masked_fill(~seen, float("-inf"))


def additive_mask_at(
    sees: CausalMask,
    positions: NoPositions,
    n_heads: int,
    query: Int[Tensor, "#batch query"],
    key: Int[Tensor, "#batch key"],
    together: Bool[Tensor, "batch 1 query key"] | None,
) -> Float[Tensor, "batch_or_1 heads_or_1 query key"]:
    """`additive_mask_of` where each sequence has positions of its own; what is hidden gets HIDDEN instead of -infinity.

    Padding may see no key at all: a softmax over nothing but -infinity would give NaN, which would spread.
    """
    distance = query[:, None, :, None] - key[:, None, None, :]
    seen = sees(query[:, None, :, None], key[:, None, None, :])
    if together is not None:
        seen = seen & together
    heads = torch.arange(n_heads, device=query.device)[None, :, None, None]
    return positions.bias(heads, distance).masked_fill(~seen, HIDDEN)


def document_ids(tokens: Int[Tensor, "batch position"], separator: int) -> Int[Tensor, "batch position"]:
    """The number of each token's document, from 0; a separator ends a document and belongs to it."""
    ends = tokens == separator
    return ends.cumsum(dim=1) - ends.to(torch.int64)
