"""Normalisation: vectors brought to one length, so that no layer depends on the size of what it reads."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · gain (Zhang & Sennrich 2019), computed in fp32 and returned in x's dtype."""

    gain: Float[Tensor, " d_model"]

    def __init__(self, d_model: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Scale each vector to a root mean square of 1, then each of its numbers by its gain."""
        return _RMSNorm.apply(x, self.gain, self.eps)  # pyright: ignore[reportReturnType]


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and one number a vector for the backward pass, where autograd would keep the output too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        # In bf16 the mean of a thousand squares would keep two digits.
        wide = x.float()
        inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gain, inverse_rms)
        return (wide * inverse_rms * gain).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gain, inverse_rms = ctx.saved_tensors
        gradient, normed = grad_outputs[0].float(), x.float() * inverse_rms
        by_gain = gradient * normed
        grad_gain = by_gain.flatten(0, -2).sum(dim=0).to(gain.dtype)
        along = by_gain.mul_(gain).mean(dim=-1, keepdim=True)
        # What would only lengthen or shorten the vector is taken out: its length does not matter.
        grad_x = (gradient * gain).addcmul_(normed, along, value=-1).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_gain, None


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) · gain + bias (Ba et al. 2016), computed in fp32, returned in x's dtype."""

    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"] | None

    def __init__(self, d_model: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d_model))
        self.register_parameter("bias", nn.Parameter(torch.zeros(d_model)) if bias else None)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Take each vector's mean off, scale it to a variance of 1, then each of its numbers by its gain."""
        # torch's operator sums in fp32 whatever the dtype, and keeps two numbers a vector for its backward pass.
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.gain.shape, self.gain.float(), bias, self.eps).to(x.dtype)


def layer_norm_reference(
    x: Float[Tensor, "*batch d_model"], gain: Float[Tensor, " d_model"], bias: Float[Tensor, " d_model"], eps: float
) -> Float[Tensor, "*batch d_model"]:
    """Layer normalisation spelled out: what the fused operator computes."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * gain + bias


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
