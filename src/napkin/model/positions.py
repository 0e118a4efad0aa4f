"""Position schemes: how a model knows where a token is in its sequence.

A scheme may act in three places, and most act in one: `embed` adds to the embedding, `rotate` rotates queries and keys,
`bias` lowers scores. The base class is the scheme without positions: the causal mask alone tells a token how many are
before it (Kazemnejad et al. 2023).

Rotary positions (Su et al. 2021): a query and a key see how far apart they are, and nothing else.

Each head is read as points in planes; point i is rotated by position · θ^(-2i/head_dim). The dot product of a query
at position m and a key at position n then depends only on m - n. To use a longer context than a model was trained on,
the frequencies θ^(-2i/head_dim), in radians per token, are scaled.
"""

import math
from collections.abc import Callable
from typing import ClassVar, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from napkin.errors import NapkinError
from napkin.kernels.pointwise.rotary import rotate_halves, rotate_interleaved
from napkin.model.layers import truncated_normal

Rotation = tuple[Float[Tensor, "*batch position head_dim"], Float[Tensor, "*batch position head_dim"]] | tuple[()]
"""Cosines and signed sines for each position; empty if nothing is rotated."""

Frequencies = Float[Tensor, " half_head_dim"]
Scaled = tuple[Float[Tensor, " half_head_dim"], float]
"""The frequencies to use, and a factor for the length of the rotated vectors."""


class RotaryEmbedding(nn.Module):
    """The angles' cosines and sines for positions 0 .. context_length - 1, tabulated in fp32.

    `pairing` is a key of PAIRINGS and `scaling` one of ROPE_SCALINGS, which takes `factor` and `original_context`;
    `length` is the factor of rotated vectors' length, None is the scaling's. The tables are buffers that no checkpoint
    stores: they follow from the config.
    """

    cosines: Float[Tensor, "context_length head_dim"]
    signed_sines: Float[Tensor, "context_length head_dim"]

    def __init__(
        self,
        head_dim: int,
        context_length: int,
        *,
        theta: float = 10000.0,
        pairing: str = "halves",
        scaling: str = "none",
        factor: float = 1.0,
        original_context: float | None = None,
        length: float | None = None,
    ) -> None:
        super().__init__()
        self.rotate, lay_out = PAIRINGS[pairing]
        frequencies = rope_frequencies(head_dim, theta)
        frequencies, usual = ROPE_SCALINGS[scaling](frequencies, theta, factor, original_context or context_length)
        length = usual if length is None else length
        angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
        cosines, sines = (length * angles.cos()).float(), (length * angles.sin()).float()
        self.register_buffer("cosines", lay_out(cosines, cosines), persistent=False)
        self.register_buffer("signed_sines", lay_out(-sines, sines), persistent=False)

    def forward(
        self, positions: int | Int[Tensor, "*batch position"], *, start: int = 0
    ) -> tuple[Float[Tensor, "*batch position head_dim"], Float[Tensor, "*batch position head_dim"]]:
        """The tables' rows, as `rotate` takes them: once per step, for all layers.

        `positions` names them, or is the number of those from `start` on. Raises NapkinError for a position that the
        tables do not have; under torch.compile, which has no values, positions in a tensor are not checked.
        """
        if isinstance(positions, int):
            self._check(start, start + positions - 1)
            return self.cosines[start : start + positions], self.signed_sines[start : start + positions]
        if positions.numel() and not (torch.compiler.is_compiling() or positions.is_meta or is_fake(positions)):
            self._check(*(int(end) for end in positions.aminmax()))
        return self.cosines[positions], self.signed_sines[positions]

    def _check(self, first: int, last: int) -> None:
        limit = len(self.cosines)
        if first < 0 or last >= limit:
            raise NapkinError(
                f"position {first if first < 0 else last} is not among the {limit} of the rotary tables: use 0 to "
                f"{limit - 1}, or build them with a larger context_length"
            )


def rope_frequencies(head_dim: int, theta: float) -> Frequencies:
    """The angles by which the planes of a head turn from one position to the next, unscaled."""
    # In fp64: an fp32 angle at position 100,000 would be wrong in its third decimal.
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _in_halves(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), dim=-1)


def _as_neighbours(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), dim=-1).flatten(-2)


PAIRINGS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "halves": (rotate_halves, _in_halves),
    "interleaved": (rotate_interleaved, _as_neighbours),
}
"""The rotation of each pairing, and how its tables are laid out."""


def unscaled(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Scaled:
    """The frequencies, unscaled."""
    return frequencies, 1.0


def linear(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Scaled:
    """Every angle divided by the factor: positions interpolated (Chen et al. 2023)."""
    return frequencies / factor, 1.0


def ntk(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Scaled:
    """A larger base: the slowest angle is divided by the factor, the fastest stays ("NTK-aware", Peng et al. 2023,
    section 3.1)."""
    half = len(frequencies)
    ramp = torch.arange(half, dtype=frequencies.dtype, device=frequencies.device) / (half - 1)
    return frequencies * factor**-ramp, 1.0


def yarn(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Scaled:
    """Angles that turn 32 times or more in the original context stay, those that turn once or less are divided by the
    factor, with a ramp between; vectors longer by 0.1 · ln(factor) + 1 (Peng et al. 2023, section 3.2 to 3.4)."""
    half = len(frequencies)

    def index_of(turns: float) -> float:
        return half * math.log(original_context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = max(math.floor(index_of(32)), 0), min(math.ceil(index_of(1)), 2 * half - 1)
    ramp = (torch.arange(half, dtype=frequencies.dtype, device=frequencies.device) - first) / max(last - first, 1e-3)
    stretched = ramp.clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / factor * stretched, 0.1 * math.log(factor) + 1


def llama3(frequencies: Frequencies, theta: float, factor: float, original_context: float) -> Scaled:
    """Wavelengths below a quarter of the original context stay, those above it are stretched by the factor, with a
    ramp of the angles between (Llama 3.1's reference code)."""
    turns = original_context * frequencies / (2 * math.pi)
    kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return frequencies * kept + frequencies / factor * (1 - kept), 1.0


ROPE_SCALINGS: dict[str, Callable[[Frequencies, float, float, float], Scaled]] = {
    "none": unscaled,
    "linear": linear,
    "ntk": ntk,
    "yarn": yarn,
    "llama3": llama3,
}


def unrotated(x: Float[Tensor, "batch position heads head_dim"]) -> Float[Tensor, "batch position heads head_dim"]:
    """x unchanged, for schemes that rotate nothing."""
    return x


class NoPositions(nn.Module):
    """No positions ("NoPE"), and the base of all schemes."""

    rotate: ClassVar[Callable[..., Tensor]] = staticmethod(unrotated)

    @property
    def has_bias(self) -> bool:
        """True if it changes scores."""
        return type(self).bias is not NoPositions.bias

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
        """`rotation` for arbitrary positions of each sequence, which are not checked."""
        return ()

    @no_type_check  # a kernel's compiler reads it, see napkin.model.attention
    def bias(self, head: Int[Tensor, "*heads"], distance: Int[Tensor, "*pairs"]) -> Shaped[Tensor, "..."]:
        """The number that is added to the score of a query and a key `distance` before it; both arguments broadcast."""
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

    @no_type_check  # a kernel's compiler reads it, see napkin.model.attention
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
