"""Position schemes: how a model knows where a token is in its sequence.

A scheme may act in three places, and most act in one: `embed` adds to the embedding, `rotate` rotates queries and keys,
`bias` lowers scores. The base class, no positions at all, does nothing in any of them: a causal mask alone tells a
token how many are before it (Kazemnejad et al. 2023).
"""

import math
from collections.abc import Callable
from typing import ClassVar, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from napkin.model.initialization import truncated_normal
from napkin.model.rope import RotaryEmbedding, Rotation


def unrotated(x: Float[Tensor, "batch position heads head_dim"]) -> Float[Tensor, "batch position heads head_dim"]:
    """x unchanged, for schemes that rotate nothing."""
    return x


class NoPositions(nn.Module):
    """No positions ("NoPE")."""

    rotate: ClassVar[Callable[..., Tensor]] = staticmethod(unrotated)

    def embed(
        self,
        x: Float[Tensor, "batch position d_model"],
        documents: Int[Tensor, "batch position"] | None,
        positions: Int[Tensor, "#batch position"] | None = None,
    ) -> Float[Tensor, "batch position d_model"]:
        """Add to the embedding; each document starts at position 0, unless the tokens' `positions` are given."""
        return x

    def rotation(self, length: int, *, query_offset: int = 0) -> Rotation:
        """The arguments of `rotate` for positions query_offset .. length - 1: once per step, for all layers."""
        return ()

    def rotation_at(self, positions: Int[Tensor, "#batch position"]) -> Rotation:
        """The same for any positions, of each sequence its own; they are not checked."""
        return ()

    @no_type_check  # a kernel's compiler reads it, see napkin.model.masks
    def bias(self, head: Int[Tensor, "*heads"], distance: Int[Tensor, "*pairs"]) -> Shaped[Tensor, "..."]:
        """What is added to the score of a query and a key `distance` before it; both arguments broadcast."""
        return torch.zeros_like(distance, dtype=torch.float32)


class LearnedPositions(NoPositions):
    """A learned vector for each position, added to the embedding (Radford et al. 2018)."""

    weight: Float[Tensor, "context_length d_model"]

    def __init__(
        self, context_length: int, d_model: int, *, std: float, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.weight = truncated_normal(context_length, d_model, std=std, generator=generator)

    def embed(
        self,
        x: Float[Tensor, "batch position d_model"],
        documents: Int[Tensor, "batch position"] | None,
        positions: Int[Tensor, "#batch position"] | None = None,
    ) -> Float[Tensor, "batch position d_model"]:
        """Add each position's vector."""
        positions = position_ids(x.shape[1], documents, x.device) if positions is None else positions
        return x + F.embedding(positions, self.weight)


class SinusoidalPositions(NoPositions):
    """Sines and cosines of wavelengths from 2π to 2π · 10000, added to the embedding (Vaswani et al. 2017)."""

    table: Float[Tensor, "context_length d_model"]

    def __init__(self, context_length: int, d_model: int) -> None:
        super().__init__()
        frequencies = 10000.0 ** -(torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
        table = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()
        self.register_buffer("table", table, persistent=False)

    def embed(
        self,
        x: Float[Tensor, "batch position d_model"],
        documents: Int[Tensor, "batch position"] | None,
        positions: Int[Tensor, "#batch position"] | None = None,
    ) -> Float[Tensor, "batch position d_model"]:
        """Add each position's row of the table."""
        positions = position_ids(x.shape[1], documents, x.device) if positions is None else positions
        return x + F.embedding(positions, self.table)


class RotaryPositions(NoPositions):
    """Queries and keys are rotated by their positions (Su et al. 2021)."""

    def __init__(self, embedding: RotaryEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.rotate = embedding.rotate  # pyright: ignore[reportAttributeAccessIssue]

    def rotation(self, length: int, *, query_offset: int = 0) -> Rotation:
        """The cosines and signed sines of positions query_offset .. length - 1."""
        return self.embedding(length - query_offset, start=query_offset)

    def rotation_at(self, positions: Int[Tensor, "#batch position"]) -> Rotation:
        """The cosines and signed sines of those positions."""
        return self.embedding.cosines[positions], self.embedding.signed_sines[positions]


class AlibiPositions(NoPositions):
    """Scores are lowered in proportion to distance, with another slope in each head (Press et al. 2021)."""

    slopes: Float[Tensor, " n_heads"]

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(alibi_slopes(n_heads)), persistent=False)

    @no_type_check  # a kernel's compiler reads it, see napkin.model.masks
    def bias(self, head: Int[Tensor, "*heads"], distance: Int[Tensor, "*pairs"]) -> Shaped[Tensor, "..."]:
        """-slope · distance."""
        return -self.slopes[head] * distance


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ... 2^-8 if n is a power of two.

    For other n: the slopes of the power of two below, then every second one of the power above (the authors' code).
    """
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-4 * (head + 1) / power) for head in range(0, 2 * (n_heads - power), 2)]
    return slopes + between


def position_ids(
    length: int, documents: Int[Tensor, "batch position"] | None, device: torch.device
) -> Int[Tensor, "..."]:
    """Each token's position in its own document, from 0; a document is a run of equal numbers."""
    positions = torch.arange(length, device=device)
    if documents is None:
        return positions
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return positions - positions.expand(documents.shape).where(starts, 0).cummax(dim=1).values
