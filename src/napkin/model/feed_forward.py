"""The feed-forward layer: each position thinks for itself.

`FeedForward` puts an activation between two matrices, `GatedFeedForward` makes two products and passes one of them
through the activation as a gate for the other. A kind is its activation.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from napkin.model.linear_maker import LinearMaker

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """down(activation(up(x)))."""

    activation: ClassVar[Activation]
    n_up: ClassVar[int] = 1
    """Matrices that read the input."""

    def __init__(self, d_model: int, d_ff: int, *, bias: bool = False, make: LinearMaker | None = None) -> None:
        super().__init__()
        make = make or LinearMaker()
        self.up = make.linear(d_model, d_ff, bias=bias)
        self.down = make.writer(d_ff, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply to each vector."""
        return self.down(self.between(self.up(x)))

    @classmethod
    def between(cls, up: Float[Tensor, "*batch d_ff"]) -> Float[Tensor, "*batch d_ff"]:
        """What stands between the matrices."""
        return cls.activation(up)


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020)."""

    activation: ClassVar[Activation]
    n_up: ClassVar[int] = 2

    def __init__(self, d_model: int, d_ff: int, *, bias: bool = False, make: LinearMaker | None = None) -> None:
        super().__init__()
        make = make or LinearMaker()
        self.gate_up = make.linear(d_model, d_ff, d_ff, bias=bias)
        self.down = make.writer(d_ff, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Apply to each vector."""
        return self.down(self.between(self.gate_up(x)))

    @classmethod
    def between(cls, gate_up: Float[Tensor, "*batch two_d_ff"]) -> Float[Tensor, "*batch d_ff"]:
        """What stands between the matrices; the gate comes first."""
        gate, up = gate_up.chunk(2, dim=-1)
        return cls.activation(gate) * up


class ReLU(FeedForward):
    """max(z, 0)."""

    activation = staticmethod(F.relu)


class SquaredReLU(FeedForward):
    """max(z, 0)² (So et al. 2021)."""

    @staticmethod
    def activation(z: Tensor) -> Tensor:
        """Square what is above 0."""
        return F.relu(z).square()


class GELU(FeedForward):
    """z · Φ(z), with the normal distribution's Φ (Hendrycks & Gimpel 2016)."""

    activation = staticmethod(F.gelu)


class TanhGELU(FeedForward):
    """GELU with Φ(z) as (1 + tanh(sqrt(2/π) · (z + 0.044715 · z³))) / 2: GPT-2's."""

    @staticmethod
    def activation(z: Tensor) -> Tensor:
        """Approximate GELU."""
        return F.gelu(z, approximate="tanh")


class SiLU(FeedForward):
    """z · sigmoid(z)."""

    activation = staticmethod(F.silu)


class GLU(GatedFeedForward):
    """A sigmoid for a gate (Dauphin et al. 2016)."""

    activation = staticmethod(torch.sigmoid)


class ReGLU(GatedFeedForward):
    """ReLU for a gate."""

    activation = staticmethod(F.relu)


class GEGLU(GatedFeedForward):
    """GELU for a gate."""

    activation = staticmethod(F.gelu)


class TanhGEGLU(GatedFeedForward):
    """The approximate GELU for a gate (Gemma)."""

    activation = staticmethod(TanhGELU.activation)


class SwiGLU(GatedFeedForward):
    """SiLU for a gate; the gate's activation is computed again in the backward pass and not kept for it."""

    activation = staticmethod(F.silu)

    @classmethod
    def between(cls, gate_up: Float[Tensor, "*batch two_d_ff"]) -> Float[Tensor, "*batch d_ff"]:
        """silu(gate) · up."""
        if torch.compiler.is_compiling():
            # A compiler sees for itself what is better computed again.
            return super().between(gate_up)
        return _SiLUProduct.apply(gate_up)  # pyright: ignore[reportReturnType]


class _SiLUProduct(torch.autograd.Function):
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


FEED_FORWARDS: dict[str, type[FeedForward] | type[GatedFeedForward]] = {
    "swiglu": SwiGLU,
    "geglu": GEGLU,
    "geglu_tanh": TanhGEGLU,
    "reglu": ReGLU,
    "glu": GLU,
    "silu": SiLU,
    "gelu": GELU,
    "gelu_tanh": TanhGELU,
    "relu": ReLU,
    "relu_squared": SquaredReLU,
}
