"""The gate of SwiGLU (Shazeer 2020): silu(gate) · up, for gate and up side by side in one tensor."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.compiled.loading import load_for_training
from napkin.kernels.cpu_operator import cpu_operator, differentiable, is_computed
from napkin.kernels.rows_on_threads import on_threads

GateUp = Float[Tensor, "*batch two_d_ff"]
Gated = Float[Tensor, "*batch d_ff"]


def swiglu_reference(gate_up: GateUp) -> Gated:
    """The formula; autograd keeps silu(gate) beside its inputs."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(gate_up: GateUp) -> Gated:
    """The same; the backward pass computes silu(gate) again instead of keeping it."""
    if torch.compiler.is_compiling():
        # A compiler decides for itself what to compute again.
        return swiglu_reference(gate_up)
    return _SwiGLU.apply(gate_up)  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

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
    """The same, in one compiled pass over memory on a CPU; `swiglu` where there is none."""
    gate_up = gate_up.contiguous()
    if not is_computed(gate_up):
        return swiglu(gate_up)
    return differentiable(gate_up, _forward, _backward)


@cpu_operator(
    "compiled_swiglu(Tensor gate_up) -> Tensor",
    lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
)
def _forward(gate_up: Tensor) -> Tensor:
    load_for_training()
    from napkin.kernels.compiled.activations import swiglu_forward

    width = gate_up.shape[-1] // 2
    result = gate_up.new_empty(*gate_up.shape[:-1], width)
    addresses = gate_up.data_ptr(), gate_up.dtype == torch.bfloat16, result.data_ptr()
    on_threads(
        swiglu_forward,
        lambda start, stop, buffer: (*addresses, start, stop, width, buffer),
        result.numel() // max(width, 1),
        2 * width,
        2 * width,
    )
    return result


@cpu_operator(
    "compiled_swiglu_backward(Tensor gradient, Tensor gate_up) -> Tensor",
    lambda gradient, gate_up: torch.empty_like(gate_up),
)
def _backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    load_for_training()
    from napkin.kernels.compiled.activations import swiglu_backward

    width, result = gradient.shape[-1], torch.empty_like(gate_up)
    addresses = gate_up.data_ptr(), gradient.data_ptr(), gate_up.dtype == torch.bfloat16, result.data_ptr()
    on_threads(
        swiglu_backward,
        lambda start, stop, buffer: (*addresses, start, stop, width, buffer),
        gradient.numel() // max(width, 1),
        2 * width,
        3 * width,
    )
    return result
