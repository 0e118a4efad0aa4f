"""Which tokens per token sees: rules about positions, written so that tensors of any shape and a GPU kernel can ask.

What a kernel's compiler reads is left unwrapped by checks of types.
"""

from typing import no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from napkin.model.position import NoPositions


class Causal:
    """Itself and all before it."""

    @no_type_check
    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query at one position sees the key at another."""
        return key <= query


class Window(Causal):
    """Itself and the size - 1 tokens before it (Beltagy et al. 2020)."""

    def __init__(self, size: int) -> None:
        self.size = size

    @no_type_check
    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query at one position sees the key at another."""
        return (key <= query) & (query - key < self.size)


def additive_mask(
    sees: Causal,
    positions: NoPositions,
    n_heads: int,
    length: int,
    documents: Int[Tensor, "batch position"] | None,
    device: torch.device,
) -> Float[Tensor, "*batch_and_heads query key"]:
    """What is added to the scores [batch, head, query, key]: the positions' bias where a key is seen, else -infinity.

    Two dimensions where it is one for all, else four.
    """
    query, key = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    seen = sees(query, key)
    if documents is not None:
        seen = seen & same_document(documents)
    heads = torch.arange(n_heads, device=device)[None, :, None, None]
    return positions.bias(heads, query - key).masked_fill(~seen, float("-inf"))


def same_document(documents: Int[Tensor, "batch position"]) -> Bool[Tensor, "batch 1 query key"]:
    """Which pairs of a sequence are of one document."""
    return documents[:, None, :, None] == documents[:, None, None, :]


def documents_of(tokens: Int[Tensor, "batch position"], separator: int) -> Int[Tensor, "batch position"]:
    """The number of each token's document, where a separator ends each; the separator belongs to the one it ends."""
    ends = tokens == separator
    return ends.cumsum(dim=1) - ends.to(torch.int64)
