"""The activations of feed-forward layers: GELU and the gate of SwiGLU, each plain, in compiled loops for a CPU
(numba_pointwise.py) and as Triton kernels for a GPU (triton_pointwise.py).

SwiGLU (Shazeer 2020) is silu(gate) · up, for gate and up side by side in one tensor. GELU is GPT-2's, with Φ(z) as
(1 + tanh(sqrt(2/π) · (z + 0.044715 · z³))) / 2 (Hendrycks & Gimpel 2016).
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.operators import (
    as_rows,
    cpu_operator,
    differentiable,
    is_bf16,
    is_computed,
    on_threads,
    operator,
    save_inputs,
)

Numbers = Float[Tensor, "*batch"]
GateUp = Float[Tensor, "*batch two_d_ff"]
Gated = Float[Tensor, "*batch d_ff"]

_PIECE = 1024
"""Numbers that a compiled loop takes at a time: they stay in the processor's first cache."""


def gelu_tanh(z: Numbers) -> Numbers:
    """GELU by its tanh approximation, as torch's operator computes it."""
    return F.gelu(z, approximate="tanh")


def compiled_gelu_tanh(z: Numbers) -> Numbers:
    """`gelu_tanh` in a compiled pass over memory on a CPU; `gelu_tanh` where there is none."""
    z = z.contiguous()
    return differentiable(z, _gelu_forward, _gelu_backward) if is_computed(z) else gelu_tanh(z)


@cpu_operator("compiled_gelu_tanh(Tensor z) -> Tensor", torch.empty_like)
def _gelu_forward(z: Tensor) -> Tensor:
    result, before = torch.empty_like(z), (z, is_bf16(z))
    kernel = "pointwise.numba_pointwise.gelu_tanh_forward"
    on_threads(kernel, (*before, result), (_PIECE,), n_rows=z.numel(), n_columns=1, buffer_size=_PIECE)
    return result


@cpu_operator(
    "compiled_gelu_tanh_backward(Tensor gradient, Tensor z) -> Tensor", lambda gradient, z: torch.empty_like(z)
)
def _gelu_backward(gradient: Tensor, z: Tensor) -> Tensor:
    result, before = torch.empty_like(z), (z, gradient, is_bf16(z))
    kernel = "pointwise.numba_pointwise.gelu_tanh_backward"
    on_threads(kernel, (*before, result), (_PIECE,), n_rows=z.numel(), n_columns=1, buffer_size=2 * _PIECE)
    return result


def fused_gelu_tanh(x: Gated) -> Gated:
    """`gelu_tanh` in one pass on a GPU."""
    return _fused_gelu(as_rows(x)).view(x.shape)


_fused_gelu = operator(
    "fused_gelu_tanh(Tensor x) -> Tensor", fake=torch.empty_like, triton="pointwise.triton_pointwise.gelu_tanh"
)(lambda x: F.gelu(x, approximate="tanh"))
_fused_gelu_backward = operator(
    "fused_gelu_tanh_backward(Tensor gradient, Tensor x) -> Tensor",
    fake=lambda gradient, x: torch.empty_like(x),
    triton="pointwise.triton_pointwise.gelu_tanh_backward",
)(lambda gradient, x: torch.ops.aten.gelu_backward(gradient, x, approximate="tanh"))
_fused_gelu.register_autograd(
    lambda ctx, gradient: _fused_gelu_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=save_inputs
)


def swiglu_reference(gate_up: GateUp) -> Gated:
    """The formula; autograd keeps silu(gate) beside its inputs."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(gate_up: GateUp) -> Gated:
    """`swiglu_reference` with a backward pass that computes silu(gate) again instead of keeping it."""
    if torch.compiler.is_compiling():
        # A compiler decides for itself what to compute again.
        return swiglu_reference(gate_up)
    return _SwiGLU.apply(gate_up)  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_reference(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate_up,) = ctx.saved_tensors
        (gate, up), (gradient,) = gate_up.chunk(2, dim=-1), grad_outputs
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=grad_gate)
        torch.mul(F.silu(gate), gradient, out=grad_up)
        return result


def compiled_swiglu(gate_up: GateUp) -> Gated:
    """`swiglu` in one compiled pass over memory on a CPU; `swiglu` where there is none."""
    gate_up = gate_up.contiguous()
    if not is_computed(gate_up) or gate_up.shape[-1] % 2:
        return swiglu(gate_up)
    return differentiable(gate_up, _swiglu_forward, _swiglu_backward)


@cpu_operator(
    "compiled_swiglu(Tensor gate_up) -> Tensor",
    lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
)
def _swiglu_forward(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[-1] // 2
    result = gate_up.new_empty(*gate_up.shape[:-1], width)
    on_threads(
        "pointwise.numba_pointwise.swiglu_forward",
        (gate_up, is_bf16(gate_up), result),
        (width,),
        n_rows=result.numel() // max(width, 1),
        n_columns=2 * width,
        buffer_size=2 * width,
    )
    return result


@cpu_operator(
    "compiled_swiglu_backward(Tensor gradient, Tensor gate_up) -> Tensor",
    lambda gradient, gate_up: torch.empty_like(gate_up),
)
def _swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    width, result = gradient.shape[-1], torch.empty_like(gate_up)
    on_threads(
        "pointwise.numba_pointwise.swiglu_backward",
        (gate_up, gradient, is_bf16(gate_up), result),
        (width,),
        n_rows=gradient.numel() // max(width, 1),
        n_columns=2 * width,
        buffer_size=3 * width,
    )
    return result


def fused_swiglu(gate_up: GateUp) -> Gated:
    """`swiglu` in one pass on a GPU."""
    return _fused_swiglu(as_rows(gate_up)).view(*gate_up.shape[:-1], -1)


_fused_swiglu = operator(
    "fused_swiglu(Tensor gate_up) -> Tensor",
    fake=lambda gate_up: gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2),
    triton="pointwise.triton_pointwise.swiglu",
)(swiglu_reference)


@operator(
    "fused_swiglu_backward(Tensor gradient, Tensor gate_up) -> Tensor",
    fake=lambda gradient, gate_up: torch.empty_like(gate_up),
    triton="pointwise.triton_pointwise.swiglu_backward",
)
def _fused_swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    grad_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat((grad_gate, gradient * F.silu(gate)), dim=-1)


_fused_swiglu.register_autograd(
    lambda ctx, gradient: _fused_swiglu_backward(gradient.contiguous(), *ctx.saved_tensors), setup_context=save_inputs
)
