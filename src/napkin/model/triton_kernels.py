"""A model whose operators between matrix products are napkin's Triton kernels for a GPU.

The same operators compute in torch where Triton cannot, see `napkin.kernels.triton.usable`: a count of them needs
neither a GPU nor Triton.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.fused_grouped_gemm import fused_grouped_matmul
from napkin.kernels.fused_norms import fused_layer_norm, fused_rms_norm
from napkin.kernels.fused_rows import FUSED_ROTATIONS, fused_gelu_tanh, fused_swiglu
from napkin.kernels.grouped_gemm import grouped_matmul
from napkin.kernels.layer_normalization import layer_norm
from napkin.kernels.rms_normalization import rms_norm
from napkin.model.compiled_kernels import Forms, replacements
from napkin.model.loss import fused_next_token_loss, next_token_loss
from napkin.model.mlp import SwiGLU, TanhGELU
from napkin.model.norm import LayerNorm, RMSNorm
from napkin.model.transformer import Transformer

Vectors = Float[Tensor, "*batch d_model"]
Gain = Float[Tensor, " d_model"]


def use_triton_kernels(model: Transformer) -> None:
    """Let the modules of a model compute with the fused forms; the same numbers, but for the order of sums.

    Norms add what was written to the residual stream in the same pass. Those that only linear layers read write, under
    autocast, numbers of its format.
    """
    for module, name, form in replacements(model, FUSED):
        setattr(module, name, form)
        if isinstance(module, (RMSNorm, LayerNorm)):
            module.adds = True


def _rms_norm(
    x: Vectors, gain: Gain, eps: float, residual: Vectors | None = None, *, narrow: bool = False
) -> Vectors | tuple[Vectors, Vectors]:
    """The norm or, with a residual, the sum and its norm."""
    normed, summed = fused_rms_norm(x, gain, eps, residual, dtype=_written(x, narrow))
    return normed if residual is None else (summed, normed)


def _layer_norm(
    x: Vectors, gain: Gain, bias: Gain | None, eps: float, residual: Vectors | None = None, *, narrow: bool = False
) -> Vectors | tuple[Vectors, Vectors]:
    normed, summed = fused_layer_norm(x, gain, bias, eps, residual, dtype=_written(x, narrow))
    return normed if residual is None else (summed, normed)


def _written(x: Tensor, narrow: bool) -> torch.dtype | None:
    """The dtype of a norm, None is that of the residual stream."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if narrow and torch.is_autocast_enabled(device_type) else None


FUSED: Forms = {
    rms_norm: _rms_norm,
    layer_norm: _layer_norm,
    **FUSED_ROTATIONS,
    SwiGLU.activate: fused_swiglu,
    TanhGELU.activate: fused_gelu_tanh,
    grouped_matmul: fused_grouped_matmul,
    next_token_loss: fused_next_token_loss,
}
"""The fused form of an operator, by the form that a model has without."""
