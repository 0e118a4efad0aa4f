"""Context parallelism: ranks split each sequence, and the keys and values of all go around them in a ring.

Everything outside of attention acts on each token alone, and works unchanged on a rank's own tokens. The parts that
depend on positions are replaced: rotations and learned positions become those of the rank's own columns of the
sequence, and attention becomes ring attention (`napkin.kernels.attention.ring`). For documents that are kept apart,
only document ids are gathered.
"""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from napkin.distributed.process_group import all_gather
from napkin.kernels.attention.ring import ring_attention
from napkin.model.attention import (
    CausalMask,
    CausalSelfAttention,
    Documents,
    FusedAttention,
    Keys,
    PlainAttention,
    Queries,
    additive_mask_of,
)
from napkin.model.latent_attention import LatentAttention
from napkin.model.positions import NoPositions, Rotation
from napkin.model.transformer import Transformer
from napkin.recipe.layout import chunks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tokens = Int[Tensor, "batch position"]


def split_sequences(model: Transformer, mesh: "DeviceMesh") -> None:
    """Make a model compute this rank's columns of each sequence; `mesh` is that of the ranks that split it.

    The names of its parameters stay.
    """
    columns = OwnColumns(mesh)
    positions = model.positions
    replaced = {"rotation": OwnRotation(positions, columns), "embed": OwnEmbedding(positions, columns)}
    for name, replacement in replaced.items():
        setattr(positions, name, replacement)
    layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention | LatentAttention)]
    rings = {attend: RingAttention(attend, columns) for attend in {layer.attend for layer in layers}}
    for layer in layers:
        layer.attend = rings[layer.attend]


class OwnColumns:
    """The columns of a sequence that this rank has."""

    def __init__(self, mesh: "DeviceMesh") -> None:
        self.group = mesh.get_group()
        self.place, self.parts = mesh.get_local_rank(), mesh.size()

    def chunks(self, length: int) -> tuple[slice, ...]:
        """The columns of a sequence of which this rank has `length` tokens."""
        return chunks(self.place, self.parts, length * self.parts)

    def of_all(self, length: int, device: torch.device) -> Int[Tensor, " all_positions"]:
        """The positions of the tokens of the first rank, then of the second, and so on: `length` each."""
        whole = torch.arange(length * self.parts, device=device)
        every = (chunks(place, self.parts, length * self.parts) for place in range(self.parts))
        return torch.cat([whole[chunk] for own in every for chunk in own])

    def gathered(self, documents: Tokens) -> Int[Tensor, "batch all_positions"]:
        """The documents of all ranks' tokens, in the order of `of_all`; a collective."""
        return all_gather(documents, 1, self.group)


class OwnRotation:
    """A position scheme's `rotation` at this rank's columns."""

    def __init__(self, positions: NoPositions, columns: OwnColumns) -> None:
        self.rotation = positions.rotation
        self.columns = columns

    def __call__(self, length: int, *, query_offset: int = 0) -> Rotation:
        """The rotation of this rank's `length` tokens."""
        parts = [self.rotation(own.stop, query_offset=own.start) for own in self.columns.chunks(length)]
        return tuple(torch.cat(tables, dim=-2) for tables in zip(*parts, strict=True))  # pyright: ignore[reportReturnType]


class OwnEmbedding:
    """A position scheme's `embed` at this rank's columns."""

    def __init__(self, positions: NoPositions, columns: OwnColumns) -> None:
        self.embed = positions.embed
        self.adds = type(positions).embed is not NoPositions.embed
        self.columns = columns

    def __call__(
        self, x: Float[Tensor, "batch position d_model"], documents: Documents
    ) -> Float[Tensor, "batch position d_model"]:
        """Add to the embedding of this rank's tokens; each document starts at position 0."""
        if not self.adds:
            return x
        length, columns = x.shape[1], self.columns
        everywhere = None
        if documents is not None:
            everywhere = columns.gathered(documents)[:, columns.of_all(length, x.device).argsort()]
        zeros = x.new_zeros(1 if documents is None else len(x), length * columns.parts, x.shape[2])
        added = self.embed(zeros, everywhere)
        return x + torch.cat([added[:, own] for own in columns.chunks(length)], dim=1)


class RingAttention(FusedAttention):
    """The numbers of any implementation of attention, computed in a ring."""

    one_width = True

    def __init__(self, attend: PlainAttention | FusedAttention, columns: OwnColumns) -> None:
        super().__init__(attend.n_heads, scale=attend.scale, sees=attend.sees)
        self.softcap: float = getattr(attend, "softcap", None) or 0.0
        self.columns = columns

    def prepare(self, positions: NoPositions, length: int, documents: Documents, device: torch.device) -> Any:
        """The mask of this rank's queries over all keys; None where it is the causal one. A collective if there are
        documents."""
        is_causal = type(self.sees) is CausalMask and type(positions).bias is NoPositions.bias
        if is_causal and documents is None:
            return None
        keys, place = self.columns.of_all(length, device), self.columns.place
        together = None
        if documents is not None:
            together = documents[:, None, :, None] == self.columns.gathered(documents)[:, None, None, :]
        queries = keys[place * length : (place + 1) * length]
        return additive_mask_of(self.sees, positions, self.n_heads, queries, keys, together)

    def __call__(self, queries: Queries, keys: Keys, values: Keys, prepared: Any) -> Queries:
        """Mix the values by their weights; a collective."""
        columns = self.columns
        ring = {"group": columns.group.group_name, "ranks": columns.parts}
        return ring_attention(queries, keys, values, prepared, self.scale, **ring, softcap=self.softcap)
