"""Operators that read each row once: norms with the residual addition, rotary positions, gates.

Each is one operator of `torch.ops.napkin`, forward and backward: a Triton kernel on a GPU (`napkin.kernels.triton`),
the plain form elsewhere, which is that of `rms_normalization`, `layer_normalization`, `rope` and `swiglu_gate`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.triton.usable import runs_triton

Vectors = Float[Tensor, "*batch d_model"]
Gain = Float[Tensor, " d_model"]
Heads = Float[Tensor, "batch position heads head_dim"]
Table = Float[Tensor, "#batch position head_dim"]


def fused_rms_norm(x: Vectors, gain: Gain, eps: float, residual: Vectors | None = None) -> tuple[Vectors, Vectors]:
    """rms_norm(x + residual), and the sum, which is x if there is no residual."""
    return _normed(x, residual, gain, None, eps, centred=False)


def fused_layer_norm(
    x: Vectors, gain: Gain, bias: Gain | None, eps: float, residual: Vectors | None = None
) -> tuple[Vectors, Vectors]:
    """layer_norm(x + residual), and the sum, which is x if there is no residual."""
    return _normed(x, residual, gain, bias, eps, centred=True)


def fused_rotate(x: Heads, cosines: Table, signed_sines: Table, *, interleaved: bool = False) -> Heads:
    """`rotate_halves`, or `rotate_interleaved`, of queries and keys side by side."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return torch.ops.napkin.fused_rotate(x, cosines.contiguous(), signed_sines.contiguous(), interleaved, False)


def fused_swiglu(gate_up: Float[Tensor, "*batch two_d_ff"]) -> Float[Tensor, "*batch d_ff"]:
    """silu(gate) · up of gate and up side by side."""
    return torch.ops.napkin.fused_swiglu(_rows(gate_up)).view(*gate_up.shape[:-1], -1)


def fused_gelu_tanh(x: Float[Tensor, "*batch d_ff"]) -> Float[Tensor, "*batch d_ff"]:
    """GELU by its tanh approximation."""
    return torch.ops.napkin.fused_gelu_tanh(_rows(x)).view(x.shape)


def _normed(
    x: Tensor, residual: Tensor | None, gain: Tensor, bias: Tensor | None, eps: float, *, centred: bool
) -> tuple[Tensor, Tensor]:
    rows = None if residual is None else _rows(residual)
    result, summed, _ = torch.ops.napkin.fused_norm(_rows(x), rows, gain, bias, eps, centred)
    return result.view(x.shape), x if residual is None else summed.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def norm_reference(
    x: Tensor, residual: Tensor | None, gain: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x [rows, width]: the norm, the sum, and the rows' means and inverse deviations, [2, rows] in fp32.

    The sum is empty without a residual, else it is rounded to x's dtype before it is normalized. Means are not written
    where they are not subtracted.
    """
    summed = x if residual is None else x + residual
    wide = summed.to(torch.promote_types(x.dtype, torch.float32))
    statistics = wide.new_zeros(2, len(x))
    if centred:
        statistics[0] = wide.mean(dim=1)
        wide = wide - statistics[0, :, None]
    statistics[1] = torch.rsqrt(wide.square().mean(dim=1) + eps)
    result = wide * statistics[1, :, None] * gain
    result = result if bias is None else result + bias
    return result.to(x.dtype), x.new_empty(0) if residual is None else summed, statistics


def norm_backward_reference(
    gradient: Tensor,
    grad_summed: Tensor | None,
    summed: Tensor,
    gain: Tensor,
    statistics: Tensor,
    biased: bool,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the sum, of the gain and of the bias, which is empty if there is none."""
    wide, upstream = summed.to(statistics.dtype), gradient.to(statistics.dtype)
    normed = (wide - statistics[0, :, None] if centred else wide) * statistics[1, :, None]
    by_gain = upstream * gain
    along = by_gain - normed * (by_gain * normed).mean(dim=1, keepdim=True)
    along = along - by_gain.mean(dim=1, keepdim=True) if centred else along
    grad_x = along * statistics[1, :, None]
    grad_x = grad_x if grad_summed is None else grad_x + grad_summed
    grad_bias = upstream.sum(dim=0).to(gain.dtype) if biased else gain.new_empty(0)
    return grad_x.to(summed.dtype), (upstream * normed).sum(dim=0).to(gain.dtype), grad_bias


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


_NORM = "(Tensor x, Tensor? residual, Tensor gain, Tensor? bias, float eps, bool centred) -> (Tensor, Tensor, Tensor)"
_NORM_BACKWARD = (
    "(Tensor gradient, Tensor? grad_summed, Tensor summed, Tensor gain, Tensor statistics, bool biased, bool centred) "
    "-> (Tensor, Tensor, Tensor)"
)
_ROTATE = "(Tensor x, Tensor cosines, Tensor sines, bool interleaved, bool transposed) -> Tensor"


@torch.library.custom_op("napkin::fused_norm", mutates_args=(), schema=_NORM)
def _norm(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_triton(x):
        return norm_reference(x, *others)
    from napkin.kernels.triton.norms import norm

    return norm(x, *others)


@torch.library.custom_op("napkin::fused_norm_backward", mutates_args=(), schema=_NORM_BACKWARD)
def _norm_backward(gradient: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_triton(gradient):
        return norm_backward_reference(gradient, *others)
    from napkin.kernels.triton.norms import norm_backward

    return norm_backward(gradient, *others)


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


@_norm.register_fake
def _(x: Tensor, residual: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x)
    return torch.empty_like(x), summed, x.new_empty(2, len(x), dtype=wide)


@_norm_backward.register_fake
def _(
    gradient: Tensor,
    grad_summed: Tensor | None,
    summed: Tensor,
    gain: Tensor,
    statistics: Tensor,
    biased: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(summed), torch.empty_like(gain), torch.empty_like(gain) if biased else gain.new_empty(0)


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


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, gain, bias, _, ctx.centred = inputs
    ctx.added, ctx.biased = residual is not None, bias is not None
    ctx.save_for_backward(output[1] if ctx.added else x, gain, output[2])
    ctx.mark_non_differentiable(*([output[2]] if ctx.added else output[1:]))
    ctx.set_materialize_grads(False)


def _differentiate_norm(ctx: Any, gradient: Tensor | None, grad_summed: Tensor | None, _: Any) -> tuple[Any, ...]:
    summed, gain, statistics = ctx.saved_tensors
    gradient = torch.zeros_like(summed) if gradient is None else gradient.contiguous()
    grad_summed = None if grad_summed is None else grad_summed.contiguous()
    grad_x, grad_gain, grad_bias = _norm_backward(
        gradient, grad_summed, summed, gain, statistics, ctx.biased, ctx.centred
    )
    return grad_x, grad_x if ctx.added else None, grad_gain, grad_bias if ctx.biased else None, None, None


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tables, ctx.interleaved, ctx.transposed = inputs
    ctx.save_for_backward(*tables)


def _differentiate_rotation(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    return _rotate(gradient, *ctx.saved_tensors, ctx.interleaved, not ctx.transposed), None, None, None, None


def _save_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)
_rotate.register_autograd(_differentiate_rotation, setup_context=_save_rotation)
_swiglu.register_autograd(
    lambda ctx, gradient: _swiglu_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=_save_input
)
_gelu.register_autograd(
    lambda ctx, gradient: _gelu_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=_save_input
)
