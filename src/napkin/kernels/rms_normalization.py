"""RMS normalization: x / sqrt(mean(x²) + eps) · gain (Zhang & Sennrich 2019), in fp32, returned in x's dtype."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.norm_operator import normalize_rows

Vectors = Float[Tensor, "*batch d_model"]
Gain = Float[Tensor, " d_model"]


def rms_norm_reference(x: Vectors, gain: Gain, eps: float) -> Vectors:
    """The formula; autograd keeps the input, its normalized form and the output."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * gain).to(x.dtype)


def rms_norm(x: Vectors, gain: Gain, eps: float) -> Vectors:
    """The same; the backward pass keeps x and one number per vector."""
    return _RMSNorm.apply(x, gain, eps)  # pyright: ignore[reportReturnType]


def compiled_rms_norm(x: Vectors, gain: Gain, eps: float, *, narrow: bool = False) -> Vectors:
    """The same in a compiled loop on a CPU, `narrow` under autocast in autocast's format, as what reads it takes it.

    `rms_norm` where there is no such loop.
    """
    result = normalize_rows(x, gain, None, eps, centred=False, narrow=narrow)
    return rms_norm(x, gain, eps) if result is None else result


class _RMSNorm(torch.autograd.Function):
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
        # The output does not depend on the vector's length: the gradient's component along the vector is removed.
        grad_x = (gradient * gain).addcmul_(normed, along, value=-1).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_gain, None
