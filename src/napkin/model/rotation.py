"""Rotary positions (Su et al. 2021): a query and a key see how far apart they are, and nothing else.

Each head is read as points in planes; point i is turned by position · θ^(-2i/head_dim). The dot product of a query
turned by m and a key turned by n depends on m - n alone. Which two numbers make a point is a convention: number i of
each half of the head, or neighbours.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from napkin.model.rope_scaling import ROPE_SCALINGS

Rotation = tuple[Float[Tensor, "position head_dim"], Float[Tensor, "position head_dim"]] | tuple[()]
"""Cosines and signed sines for each position; nothing where nothing turns."""


class RotaryEmbedding(nn.Module):
    """The angles' cosines and sines for positions 0 .. context_length - 1, tabulated in fp32.

    `scaling` is a name of ROPE_SCALINGS, `factor` and `original_context` are its. The tables are buffers that no
    checkpoint stores: they follow from the config.
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
    ) -> None:
        super().__init__()
        self.rotate, lay_out = PAIRINGS[pairing]
        # In fp64: an fp32 angle at position 100,000 would be wrong in its third decimal.
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        frequencies, length = ROPE_SCALINGS[scaling](frequencies, theta, factor, original_context or context_length)
        angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
        cosines, sines = (length * angles.cos()).float(), (length * angles.sin()).float()
        self.register_buffer("cosines", lay_out(cosines, cosines), persistent=False)
        self.register_buffer("signed_sines", lay_out(-sines, sines), persistent=False)

    def forward(self, length: int) -> tuple[Float[Tensor, "length head_dim"], Float[Tensor, "length head_dim"]]:
        """The tables' first `length` rows, as `rotate` wants them: once per step, for all layers."""
        return self.cosines[:length], self.signed_sines[:length]


def rotate(
    x: Float[Tensor, "batch position heads head_dim"],
    cosines: Float[Tensor, "position head_dim"],
    signed_sines: Float[Tensor, "position head_dim"],
) -> Float[Tensor, "batch position heads head_dim"]:
    """Turn each head of x by its position's angles, in fp32, returned in x's dtype; halves are paired.

    (a, b) becomes (a·cos - b·sin, b·cos + a·sin). Rolling by half a head swaps the halves, and the tables carry
    the sign, so three passes over whole tensors do what the four products of halves would do in seven.
    """
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cosines[:, None], swapped, signed_sines[:, None]).to(x.dtype)


def rotate_interleaved(
    x: Float[Tensor, "batch position heads head_dim"],
    cosines: Float[Tensor, "position head_dim"],
    signed_sines: Float[Tensor, "position head_dim"],
) -> Float[Tensor, "batch position heads head_dim"]:
    """The same with neighbours paired."""
    wide = x.float()
    swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(wide * cosines[:, None], swapped, signed_sines[:, None]).to(x.dtype)


def unrotated(x: Float[Tensor, "batch position heads head_dim"]) -> Float[Tensor, "batch position heads head_dim"]:
    """x as it is, for models that turn nothing."""
    return x


def _in_halves(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), dim=-1)


def _as_neighbours(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), dim=-1).flatten(-2)


PAIRINGS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "halves": (rotate, _in_halves),
    "interleaved": (rotate_interleaved, _as_neighbours),
}
