"""Rotary positions (Su et al. 2021): a query and a key see how far apart they are, and nothing else.

Each head is split into a first and a second half; number i of the first and number i of the second are the
coordinates of a point in a plane, which is turned by position · θ^(-2i/head_dim). The dot product of a query
turned by m and a key turned by n depends on m - n alone.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """The angles' cosines and sines for positions 0 .. context_length - 1, tabulated in fp32.

    The tables are buffers that no checkpoint stores: they follow from the config.
    """

    cosines: Float[Tensor, "context_length head_dim"]
    signed_sines: Float[Tensor, "context_length head_dim"]

    def __init__(self, head_dim: int, context_length: int, *, theta: float = 10000.0) -> None:
        super().__init__()
        # In fp64: an fp32 angle at position 100,000 would be wrong in its third decimal.
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(context_length, dtype=torch.float64), frequencies)
        cosines, sines = angles.cos().float(), angles.sin().float()
        self.register_buffer("cosines", torch.cat((cosines, cosines), dim=-1), persistent=False)
        self.register_buffer("signed_sines", torch.cat((-sines, sines), dim=-1), persistent=False)

    def forward(self, length: int) -> tuple[Float[Tensor, "length head_dim"], Float[Tensor, "length head_dim"]]:
        """The tables' first `length` rows, as `rotate` wants them: once a step, for all layers."""
        return self.cosines[:length], self.signed_sines[:length]


def rotate(
    x: Float[Tensor, "batch position heads head_dim"],
    cosines: Float[Tensor, "position head_dim"],
    signed_sines: Float[Tensor, "position head_dim"],
) -> Float[Tensor, "batch position heads head_dim"]:
    """Turn each head of x by its position's angles, in fp32, returned in x's dtype.

    (a, b) becomes (a·cos - b·sin, b·cos + a·sin). Rolling by half a head swaps the halves, and the tables carry
    the sign, so three passes over whole tensors do what the four products of halves would do in seven.
    """
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cosines[:, None], swapped, signed_sines[:, None]).to(x.dtype)
