"""GELU with Φ(z) as (1 + tanh(sqrt(2/π) · (z + 0.044715 · z³))) / 2 (Hendrycks & Gimpel 2016): GPT-2's."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.compiled.loading import load_for_training
from napkin.kernels.cpu_operator import cpu_operator, differentiable, is_computed
from napkin.kernels.rows_on_threads import on_threads

Numbers = Float[Tensor, "*batch"]


def gelu_tanh(z: Numbers) -> Numbers:
    """torch's operator."""
    return F.gelu(z, approximate="tanh")


def compiled_gelu_tanh(z: Numbers) -> Numbers:
    """The same, in a compiled pass over memory on a CPU; `gelu_tanh` where there is none."""
    z = z.contiguous()
    if not is_computed(z):
        return gelu_tanh(z)
    return differentiable(z, _forward, _backward)


@cpu_operator("compiled_gelu_tanh(Tensor z) -> Tensor", torch.empty_like)
def _forward(z: Tensor) -> Tensor:
    load_for_training()
    from napkin.kernels.compiled.activations import PIECE, gelu_tanh_forward

    result = torch.empty_like(z)
    addresses = z.data_ptr(), z.dtype == torch.bfloat16, result.data_ptr()
    on_threads(gelu_tanh_forward, lambda start, stop, buffer: (*addresses, start, stop, buffer), z.numel(), 1, PIECE)
    return result


@cpu_operator(
    "compiled_gelu_tanh_backward(Tensor gradient, Tensor z) -> Tensor", lambda gradient, z: torch.empty_like(z)
)
def _backward(gradient: Tensor, z: Tensor) -> Tensor:
    load_for_training()
    from napkin.kernels.compiled.activations import PIECE, gelu_tanh_backward

    result = torch.empty_like(z)
    addresses = z.data_ptr(), gradient.data_ptr(), z.dtype == torch.bfloat16, result.data_ptr()
    on_threads(
        gelu_tanh_backward, lambda start, stop, buffer: (*addresses, start, stop, buffer), z.numel(), 1, 2 * PIECE
    )
    return result
