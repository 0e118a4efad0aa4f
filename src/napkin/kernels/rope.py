"""Rotary positions (Su et al. 2021): each pair of numbers (a, b) of a head is rotated by its position's angle.

(a, b) becomes (a·cos - b·sin, b·cos + a·sin). Which two numbers are a pair is a convention: number i of each half of
the head, or neighbours. The tables of cosines and sines are laid out likewise (`napkin.model.rope`), with the sign in
the sines: swapping the pairs and three passes over whole tensors then do what the four products of halves would do in
seven.
"""

import torch
from jaxtyping import Float
from torch import Tensor

Heads = Float[Tensor, "*batch position heads head_dim"]
Table = Float[Tensor, "*#batch position head_dim"]
"""The rows of the positions, the same for all sequences or each its own."""


def rotate_halves(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """Rotate each head of x by its position's angles, in fp32, returned in x's dtype; halves are paired."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cosines.unsqueeze(-2), swapped, signed_sines.unsqueeze(-2)).to(x.dtype)


def rotate_interleaved(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """The same with neighbours paired."""
    wide = x.float()
    swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(wide * cosines.unsqueeze(-2), swapped, signed_sines.unsqueeze(-2)).to(x.dtype)
