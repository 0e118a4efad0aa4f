"""Rotary positions (Su et al. 2021): each pair of numbers (a, b) of a head is rotated by its position's angle.

(a, b) becomes (a·cos - b·sin, b·cos + a·sin). Which two numbers are a pair is a convention: number i of each half of
the head, or neighbours. The tables of cosines and sines are laid out likewise (`napkin.model.positions`), with the sign
in the sines: swapping the pairs and three passes over whole tensors then do what the four products of halves would do
in seven; a compiled loop does it in one.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.compiled.loading import load_for_training
from napkin.kernels.cpu_operator import COMPUTED, cpu_operator, is_computed
from napkin.kernels.rows_on_threads import on_threads

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


def compiled_rotate_halves(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """`rotate_halves` in one compiled pass on a CPU, where all sequences have the same positions."""
    if not _suits(x, cosines, signed_sines):
        return rotate_halves(x, cosines, signed_sines)
    return _Rotation.apply(x, cosines, signed_sines, False)  # pyright: ignore[reportReturnType]


def compiled_rotate_interleaved(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """The same with neighbours paired."""
    if not _suits(x, cosines, signed_sines):
        return rotate_interleaved(x, cosines, signed_sines)
    return _Rotation.apply(x, cosines, signed_sines, True)  # pyright: ignore[reportReturnType]


COMPILED_ROTATIONS = {rotate_halves: compiled_rotate_halves, rotate_interleaved: compiled_rotate_interleaved}
"""The compiled form of each pairing."""


def _suits(x: Tensor, cosines: Tensor, signed_sines: Tensor) -> bool:
    if not is_computed(cosines, signed_sines) or cosines.ndim != 2 or x.ndim != 4 or x.dtype not in COMPUTED:
        return False
    # The heads of a token lie together, tokens at equal distances: as those of queries and keys beside values do.
    batch, head = x.stride(0), x.stride(2)
    return x.stride(3) == 1 and head == x.shape[3] and batch == x.shape[1] * x.stride(1)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, signed_sines: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosines, signed_sines)
        ctx.interleaved = interleaved
        return _rotate(x, cosines, signed_sines, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _rotate(grad_outputs[0].contiguous(), *ctx.saved_tensors, ctx.interleaved, True), None, None, None


def _fake_rotate(x: Tensor, cosines: Tensor, signed_sines: Tensor, interleaved: bool, backwards: bool) -> Tensor:
    return x.new_empty(x.shape)


@cpu_operator(
    "compiled_rotation(Tensor x, Tensor cosines, Tensor signed_sines, bool interleaved, bool backwards) -> Tensor",
    _fake_rotate,
)
def _rotate(x: Tensor, cosines: Tensor, signed_sines: Tensor, interleaved: bool, backwards: bool) -> Tensor:
    """The gradient of a rotation is a rotation backwards."""
    load_for_training()
    from napkin.kernels.compiled.rotations import rotate_heads

    y = x.new_empty(x.shape)
    n_sequences, n_positions, n_heads, width = x.shape
    inputs = x.data_ptr(), x.dtype == torch.bfloat16, x.stride(1), y.data_ptr(), n_heads * width
    tables = cosines.data_ptr(), signed_sines.data_ptr(), n_positions
    on_threads(
        rotate_heads,
        lambda start, stop, buffer: (*inputs, *tables, start, stop, n_heads, width, interleaved, backwards, buffer),
        n_sequences * n_positions,
        n_heads * width,
        2 * width,
    )
    return y
