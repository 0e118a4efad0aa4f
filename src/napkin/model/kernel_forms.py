"""A model whose operators between matrix products are napkin's compiled loops for a CPU, where there are some.

A model whose operators between matrix products are napkin's compiled loops for a CPU, where there are some.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from napkin.kernels.loss.log_probabilities import linear_log_probabilities
from napkin.kernels.norms.fused import fused_layer_norm, fused_rms_norm
from napkin.kernels.norms.normalization import compiled_rms_norm, layer_norm, rms_norm
from napkin.kernels.pointwise.activations import compiled_gelu_tanh, compiled_swiglu, fused_gelu_tanh, fused_swiglu
from napkin.kernels.pointwise.rotary import COMPILED_ROTATIONS, FUSED_ROTATIONS
from napkin.kernels.products.grouped import fused_grouped_matmul, grouped_matmul
from napkin.model.block import Block, ParallelBlock, PostNormBlock, ReorderedBlock
from napkin.model.config import ModelConfig
from napkin.model.layers import Linear
from napkin.model.mlp import SwiGLU, TanhGELU
from napkin.model.norm import LayerNorm, RMSNorm
from napkin.model.transformer import Transformer, fused_next_token_loss, next_token_loss

Forms = dict[Callable[..., Any], Callable[..., Any]]

COMPILED: Forms = {
    rms_norm: compiled_rms_norm,
    **COMPILED_ROTATIONS,
    SwiGLU.activate: compiled_swiglu,
    TanhGELU.activate: compiled_gelu_tanh,
    next_token_loss: functools.partial(next_token_loss, compiled=True),
    linear_log_probabilities: functools.partial(linear_log_probabilities, compiled=True),
}
"""The compiled form of an operator, by the form that a model has without. LayerNorm keeps torch's operator: between the
products of a step the compiled loop takes 1.5 times as long."""

COMPILED_FROM = 2**38
"""The products of weights and tokens, forward and backward, from which compiled kernels are worth being loaded or, once
for each machine, built: some 1.6 TFLOP, seconds of a CPU's time."""

_ATTRIBUTES = ("normalize", "rotate", "activate", "multiply_groups", "next_token_loss", "linear_log_probabilities")
"""Attributes in which modules keep their forms."""


def is_worth_compiling(config: ModelConfig, tokens: int, *, trained: bool) -> bool:
    """True if a model is computed for so many tokens that its compiled kernels save more time than they cost."""
    weights = config.d_model * (12 * config.n_layers * config.d_model + config.vocab_size)
    return weights * tokens * (1 if trained else 1 / 3) >= COMPILED_FROM


def use_compiled_kernels(model: Transformer) -> None:
    """Let the modules of a model compute with the compiled forms; the same numbers, but for the order of sums.

    A norm that only linear layers read then writes what they read: under autocast, numbers of its format.
    """
    for module, name, form in replacements(model, COMPILED):
        setattr(module, name, form)


@contextmanager
def compiled_kernels(model: Transformer) -> Iterator[None]:
    """While it lasts, the model computes with the compiled forms."""
    replaced = replacements(model, COMPILED)
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    use_compiled_kernels(model)
    try:
        yield
    finally:
        for module, name, form in before:
            setattr(module, name, form)


def replacements(model: Transformer, forms: Forms) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
    """The modules of a model that have one of those forms, under which attribute, and the form that replaces it.

    The form of a norm that only linear layers read is told to be `narrow`.
    """
    narrow = {norm for block in model.blocks for norm in _norms_before_linears(block)}
    found: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    for module in model.modules():
        for name in _ATTRIBUTES:
            form = getattr(module, name, None)
            if form is None or isinstance(form, nn.Module) or form not in forms:
                continue
            new = forms[form]
            found.append((module, name, functools.partial(new, narrow=True) if module in narrow else new))
    return found


def _norms_before_linears(block: nn.Module) -> list[nn.Module]:
    if isinstance(block, (PostNormBlock, ReorderedBlock)):
        return []
    readers = {}
    if isinstance(block, Block):
        readers = {block.attention_norm: [block.attention], block.feed_forward_norm: [block.feed_forward]}
    elif isinstance(block, ParallelBlock):
        readers = {block.norm: [block.attention, block.feed_forward]}
    return [
        norm
        for norm, layers in readers.items()
        if isinstance(norm, (RMSNorm, LayerNorm)) and all(map(_reads_by_linear, layers))
    ]


def _reads_by_linear(layer: nn.Module) -> bool:
    """True if a layer's input goes to a plain linear layer alone: not to a router, not through µP's scale."""
    first = getattr(layer, "query_key_value", None) or getattr(layer, "up", None) or getattr(layer, "gate_up", None)
    return type(first) is Linear


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
