"""Rotary positions (Su et al. 2021): each pair of numbers (a, b) of a head is rotated by its position's angle.

(a, b) becomes (a·cos - b·sin, b·cos + a·sin). Which two numbers are a pair is a convention: number i of each half of
the head, or neighbours. The tables of cosines and sines are laid out likewise (`napkin.model.positions`), with the sign
in the sines: swapping the pairs and three passes over whole tensors then do what the four products of halves would do
in seven; a compiled loop on a CPU (numba_pointwise.py) and a Triton kernel on a GPU (triton_pointwise.py) do it in
one.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.operators import COMPUTED, cpu_operator, is_bf16, is_computed, on_threads, operator

Heads = Float[Tensor, "*batch position heads head_dim"]
Table = Float[Tensor, "*#batch position head_dim"]
"""Rows for the positions, shared by all sequences or one table per sequence."""


def rotate_halves(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """Rotate each head of x by its position's angles, in fp32, returned in x's dtype; halves are paired."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(wide * cosines.unsqueeze(-2), swapped, signed_sines.unsqueeze(-2)).to(x.dtype)


def rotate_interleaved(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """`rotate_halves` with neighbours paired."""
    wide = x.float()
    swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(wide * cosines.unsqueeze(-2), swapped, signed_sines.unsqueeze(-2)).to(x.dtype)


def compiled_rotate_halves(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """`rotate_halves` in one compiled pass on a CPU, where all sequences have the same positions."""
    if not _suits(x, cosines, signed_sines):
        return rotate_halves(x, cosines, signed_sines)
    return _Rotation.apply(x, cosines, signed_sines, False)  # pyright: ignore[reportReturnType]


def compiled_rotate_interleaved(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """`compiled_rotate_halves` with neighbours paired."""
    if not _suits(x, cosines, signed_sines):
        return rotate_interleaved(x, cosines, signed_sines)
    return _Rotation.apply(x, cosines, signed_sines, True)  # pyright: ignore[reportReturnType]


COMPILED_ROTATIONS = {rotate_halves: compiled_rotate_halves, rotate_interleaved: compiled_rotate_interleaved}
"""The compiled form of each pairing."""


def _suits(x: Tensor, cosines: Tensor, signed_sines: Tensor) -> bool:
    # Tables are read as fp32: those of a model that was cast as a whole are not.
    if {cosines.dtype, signed_sines.dtype} != {torch.float32} or not is_computed(cosines, signed_sines):
        return False
    if x.ndim != 4 or x.dtype not in COMPUTED or x.shape[3] % 2:
        return False
    # Other tables are the plain form's to broadcast or to refuse: loops check nothing.
    if not cosines.shape == signed_sines.shape == (x.shape[1], x.shape[3]):
        return False
    # The heads of a token lie together, tokens at equal distances: as those of queries and keys beside values do.
    batch, head = x.stride(0), x.stride(2)
    return x.stride(3) == 1 and head == x.shape[3] and batch == x.shape[1] * x.stride(1)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, signed_sines: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosines, signed_sines)
        ctx.interleaved = interleaved
        return _rotate_in_loops(x, cosines, signed_sines, interleaved, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = grad_outputs[0].contiguous()
        return _rotate_in_loops(gradient, *ctx.saved_tensors, ctx.interleaved, True), None, None, None


@cpu_operator(
    "compiled_rotation(Tensor x, Tensor cosines, Tensor signed_sines, bool interleaved, bool backwards) -> Tensor",
    lambda x, *others: x.new_empty(x.shape),
)
def _rotate_in_loops(x: Tensor, cosines: Tensor, signed_sines: Tensor, interleaved: bool, backwards: bool) -> Tensor:
    """The gradient of a rotation is a rotation backwards."""
    y = x.new_empty(x.shape)
    n_sequences, n_positions, n_heads, width = x.shape
    on_threads(
        "pointwise.numba_pointwise.rotate_heads",
        (x, is_bf16(x), x.stride(1), y, n_heads * width, cosines, signed_sines, n_positions),
        (n_heads, width, interleaved, backwards),
        n_rows=n_sequences * n_positions,
        n_columns=n_heads * width,
        buffer_size=2 * width,
    )
    return y


def fused_rotate(x: Heads, cosines: Table, signed_sines: Table, *, interleaved: bool = False) -> Heads:
    """`rotate_halves`, or `rotate_interleaved`, of queries and keys side by side, in one pass on a GPU."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tables = (table.contiguous() if table.ndim == 3 else table.contiguous()[None] for table in (cosines, signed_sines))
    return _rotate(x, *tables, interleaved, False)


def fused_rotate_halves(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """`rotate_halves` in one pass on a GPU."""
    return fused_rotate(x, cosines, signed_sines)


def fused_rotate_interleaved(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """`rotate_interleaved` in one pass on a GPU."""
    return fused_rotate(x, cosines, signed_sines, interleaved=True)


FUSED_ROTATIONS = {rotate_halves: fused_rotate_halves, rotate_interleaved: fused_rotate_interleaved}
"""The fused form of each pairing."""


def rotate_reference(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    """x · cosines + partners of x · sines; transposed, the gradient of that."""

    def swapped(numbers: Tensor) -> Tensor:
        if interleaved:
            return numbers.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return numbers.roll(numbers.shape[-1] // 2, dims=-1)

    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sines = swapped(sines) if transposed else sines
    rotated = wide * cosines.unsqueeze(-2) + swapped(wide) * sines.unsqueeze(-2)
    return rotated.to(x.dtype).contiguous()


_rotate = operator(
    "fused_rotate(Tensor x, Tensor cosines, Tensor sines, bool interleaved, bool transposed) -> Tensor",
    fake=lambda x, *others: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    triton="pointwise.triton_pointwise.rotate",
)(rotate_reference)


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tables, ctx.interleaved, ctx.transposed = inputs
    ctx.save_for_backward(*tables)


def _differentiate_rotation(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    return _rotate(gradient, *ctx.saved_tensors, ctx.interleaved, not ctx.transposed), None, None, None, None


_rotate.register_autograd(_differentiate_rotation, setup_context=_save_rotation)
