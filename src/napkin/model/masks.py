"""Attention masks: which keys a query sees, as rules about positions.

A rule is a function of tensors of any shape, so that a mask and a compiled kernel can both be made from it. Functions
that a kernel's compiler reads are exempt from the type checks that tests enforce.
"""

from typing import no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from napkin.model.positions import NoPositions

HIDDEN = -30000.0
"""Added to a score it makes a weight of exactly 0 beside any seen key; a number of every format, fp16 among them."""


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
        """True where the query at one position sees the key at another."""
        return (key <= query) & (query - key < self.size)


def additive_mask(
    sees: CausalMask,
    positions: NoPositions,
    n_heads: int,
    length: int,
    documents: Int[Tensor, "batch position"] | None,
    device: torch.device,
    *,
    query_offset: int = 0,
) -> Float[Tensor, "*batch_and_heads query key"]:
    """The mask that is added to the scores [batch, head, query, key]: the positions' bias where a key is seen, else
    -infinity.

    Four dimensions, or two if it is the same for all sequences and heads. The keys are those of `length` positions, the
    queries those from `query_offset` on.
    """
    query, key = torch.arange(query_offset, length, device=device), torch.arange(length, device=device)
    together = None if documents is None else same_document(documents)[:, :, query_offset:]
    return additive_mask_of(sees, positions, n_heads, query, key, together)


def additive_mask_of(
    sees: CausalMask,
    positions: NoPositions,
    n_heads: int,
    query: Int[Tensor, " query"],
    key: Int[Tensor, " key"],
    together: Bool[Tensor, "batch 1 query key"] | None,
) -> Float[Tensor, "*batch_and_heads query key"]:
    """`additive_mask` for queries and keys at any positions; where `together` is False, a key is not seen."""
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
    """`additive_mask` where each sequence has positions of its own; what is hidden gets HIDDEN instead of -infinity.

    Padding may see no key at all: a softmax over -infinity alone would make NaN of it, and of what is computed of it.
    """
    distance = query[:, None, :, None] - key[:, None, None, :]
    seen = sees(query[:, None, :, None], key[:, None, None, :])
    if together is not None:
        seen = seen & together
    heads = torch.arange(n_heads, device=query.device)[None, :, None, None]
    return positions.bias(heads, distance).masked_fill(~seen, HIDDEN)


def same_document(documents: Int[Tensor, "batch position"]) -> Bool[Tensor, "batch 1 position position"]:
    """True for pairs of tokens of one document."""
    return documents[:, None, :, None] == documents[:, None, None, :]


def document_ids(tokens: Int[Tensor, "batch position"], separator: int) -> Int[Tensor, "batch position"]:
    """The number of each token's document, from 0; a separator ends a document and belongs to it."""
    ends = tokens == separator
    return ends.cumsum(dim=1) - ends.to(torch.int64)
