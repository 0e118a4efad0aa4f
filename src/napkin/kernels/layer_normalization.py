"""Layer normalization: (x - mean(x)) / sqrt(var(x) + eps) · gain + bias (Ba et al. 2016)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.norm_operator import normalize_rows

Vectors = Float[Tensor, "*batch d_model"]
Gain = Float[Tensor, " d_model"]


def layer_norm_reference(x: Vectors, gain: Gain, bias: Gain, eps: float) -> Vectors:
    """The formula, in x's dtype."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * gain + bias


def layer_norm(x: Vectors, gain: Gain, bias: Gain | None, eps: float) -> Vectors:
    """torch's operator in fp32, returned in x's dtype; the backward pass keeps x and two numbers per vector."""
    bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), gain.shape, gain.float(), bias, eps).to(x.dtype)


def compiled_layer_norm(x: Vectors, gain: Gain, bias: Gain | None, eps: float, *, narrow: bool = False) -> Vectors:
    """The same in a compiled loop on a CPU, `narrow` under autocast in autocast's format, as what reads it takes it.

    `layer_norm` where there is no such loop. Models take `layer_norm`, which is faster between the products of a step.
    """
    result = normalize_rows(x, gain, bias, eps, centred=True, narrow=narrow)
    return layer_norm(x, gain, bias, eps) if result is None else result
