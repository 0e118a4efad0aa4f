"""Feed-forward layers (MLPs), which act on each position by itself.

`FeedForward` puts an activation between two matrices; `GatedFeedForward` multiplies its input by two matrices and
passes one product through the activation as a gate for the other. The kinds differ in their activation.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from napkin.kernels.pointwise.activations import gelu_tanh, swiglu
from napkin.model.layers import Device, LinearFactory

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """down(activation(up(x)))."""

    activation: ClassVar[Activation]
    n_up: ClassVar[int] = 1
    """Number of matrices that read the input."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        bias: bool = False,
        linears: LinearFactory | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linears = (linears or LinearFactory()).on(device, dtype)
        self.up = linears.linear(d_model, d_ff, bias=bias)
        self.down = linears.residual_output(d_ff, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return self.down(self.activate(self.up(x)))

    @classmethod
    def activate(cls, up: Float[Tensor, "*batch d_ff"]) -> Float[Tensor, "*batch d_ff"]:
        """The numbers between the matrices."""
        return cls.activation(up)


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020)."""

    activation: ClassVar[Activation]
    n_up: ClassVar[int] = 2

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        bias: bool = False,
        linears: LinearFactory | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linears = (linears or LinearFactory()).on(device, dtype)
        self.gate_up = linears.linear(d_model, d_ff, d_ff, bias=bias)
        self.down = linears.residual_output(d_ff, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return self.down(self.activate(self.gate_up(x)))

    @classmethod
    def activate(cls, gate_up: Float[Tensor, "*batch two_d_ff"]) -> Float[Tensor, "*batch d_ff"]:
        """The numbers between the matrices; the gate comes first."""
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

    activation = staticmethod(gelu_tanh)


class SiLU(FeedForward):
    """z · sigmoid(z)."""

    activation = staticmethod(F.silu)


class GLU(GatedFeedForward):
    """A sigmoid for a gate (Dauphin et al. 2016)."""

    activation = staticmethod(torch.sigmoid)


class ReGLU(GatedFeedForward):
    """A gated layer with ReLU for its gate."""

    activation = staticmethod(F.relu)


class GEGLU(GatedFeedForward):
    """A gated layer with GELU for its gate."""

    activation = staticmethod(F.gelu)


class TanhGEGLU(GatedFeedForward):
    """The approximate GELU for a gate (Gemma)."""

    activation = staticmethod(TanhGELU.activation)


class SwiGLU(GatedFeedForward):
    """SiLU for a gate; its activation is computed again in the backward pass instead of being kept."""

    activation = staticmethod(F.silu)

    @classmethod
    def activate(cls, gate_up: Float[Tensor, "*batch two_d_ff"]) -> Float[Tensor, "*batch d_ff"]:
        """silu(gate) · up."""
        return swiglu(gate_up)


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
