"""The gate of SwiGLU (Shazeer 2020): silu(gate) · up, for gate and up side by side in one tensor."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

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
