"""Operators that read each row once: rotary positions, gates, activations.

Each is one operator of `torch.ops.napkin`, forward and backward: a Triton kernel on a GPU (`napkin.kernels.triton`),
the plain form elsewhere, which is that of `rope`, `swiglu_gate` and `gelu_activation`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.rope import rotate_halves, rotate_interleaved
from napkin.kernels.triton.usable import runs_triton

Heads = Float[Tensor, "batch position heads head_dim"]
Table = Float[Tensor, "*#batch position head_dim"]


def fused_rotate(x: Heads, cosines: Table, signed_sines: Table, *, interleaved: bool = False) -> Heads:
    """`rotate_halves`, or `rotate_interleaved`, of queries and keys side by side."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tables = (table.contiguous() if table.ndim == 3 else table.contiguous()[None] for table in (cosines, signed_sines))
    return torch.ops.napkin.fused_rotate(x, *tables, interleaved, False)


def fused_rotate_halves(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """`rotate_halves` in one pass."""
    return fused_rotate(x, cosines, signed_sines)


def fused_rotate_interleaved(x: Heads, cosines: Table, signed_sines: Table) -> Heads:
    """`rotate_interleaved` in one pass."""
    return fused_rotate(x, cosines, signed_sines, interleaved=True)


FUSED_ROTATIONS = {rotate_halves: fused_rotate_halves, rotate_interleaved: fused_rotate_interleaved}
"""The fused form of each pairing."""


def fused_swiglu(gate_up: Float[Tensor, "*batch two_d_ff"]) -> Float[Tensor, "*batch d_ff"]:
    """silu(gate) · up of gate and up side by side."""
    return torch.ops.napkin.fused_swiglu(as_rows(gate_up)).view(*gate_up.shape[:-1], -1)


def fused_gelu_tanh(x: Float[Tensor, "*batch d_ff"]) -> Float[Tensor, "*batch d_ff"]:
    """GELU by its tanh approximation."""
    return torch.ops.napkin.fused_gelu_tanh(as_rows(x)).view(x.shape)


def as_rows(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "row n"]:
    """All vectors of the last dimension, one after the other in memory."""
    return x.reshape(-1, x.shape[-1]).contiguous()


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


_ROTATE = "(Tensor x, Tensor cosines, Tensor sines, bool interleaved, bool transposed) -> Tensor"


@torch.library.custom_op("napkin::fused_rotate", mutates_args=(), schema=_ROTATE)
def _rotate(x: Tensor, *others: Any) -> Tensor:
    if not runs_triton(x):
        return rotate_reference(x, *others)
    from napkin.kernels.triton.elementwise import rotate

    return rotate(x, *others)


@torch.library.custom_op("napkin::fused_swiglu", mutates_args=(), schema="(Tensor gate_up) -> Tensor")
def _swiglu(gate_up: Tensor) -> Tensor:
    if not runs_triton(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    from napkin.kernels.triton.elementwise import swiglu

    return swiglu(gate_up)


@torch.library.custom_op(
    "napkin::fused_swiglu_backward", mutates_args=(), schema="(Tensor gradient, Tensor gate_up) -> Tensor"
)
def _swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    if not runs_triton(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return torch.cat((grad_gate, gradient * F.silu(gate)), dim=-1)
    from napkin.kernels.triton.elementwise import swiglu_backward

    return swiglu_backward(gradient, gate_up)


@torch.library.custom_op("napkin::fused_gelu_tanh", mutates_args=(), schema="(Tensor x) -> Tensor")
def _gelu(x: Tensor) -> Tensor:
    if not runs_triton(x):
        return F.gelu(x, approximate="tanh")
    from napkin.kernels.triton.elementwise import gelu_tanh

    return gelu_tanh(x)


@torch.library.custom_op(
    "napkin::fused_gelu_tanh_backward", mutates_args=(), schema="(Tensor gradient, Tensor x) -> Tensor"
)
def _gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    if not runs_triton(x):
        return torch.ops.aten.gelu_backward(gradient, x, approximate="tanh")
    from napkin.kernels.triton.elementwise import gelu_tanh_backward

    return gelu_tanh_backward(gradient, x)


@_rotate.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


@_swiglu_backward.register_fake
def _(gradient: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


@_gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@_gelu_backward.register_fake
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tables, ctx.interleaved, ctx.transposed = inputs
    ctx.save_for_backward(*tables)


def _differentiate_rotation(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    return _rotate(gradient, *ctx.saved_tensors, ctx.interleaved, not ctx.transposed), None, None, None, None


def _save_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_rotate.register_autograd(_differentiate_rotation, setup_context=_save_rotation)
_swiglu.register_autograd(
    lambda ctx, gradient: _swiglu_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=_save_input
)
_gelu.register_autograd(
    lambda ctx, gradient: _gelu_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=_save_input
)
