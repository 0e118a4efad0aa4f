"""A model whose operators between matrix products are napkin's compiled loops for a CPU, where there are some."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from napkin.kernels.gelu_activation import compiled_gelu_tanh
from napkin.kernels.layer_normalization import compiled_layer_norm, layer_norm
from napkin.kernels.rms_normalization import compiled_rms_norm, rms_norm
from napkin.kernels.rope import COMPILED_ROTATIONS
from napkin.kernels.swiglu_gate import compiled_swiglu
from napkin.model.block import Block, ParallelBlock, PostNormBlock, ReorderedBlock
from napkin.model.linear import Linear
from napkin.model.loss import next_token_loss
from napkin.model.mlp import SwiGLU, TanhGELU
from napkin.model.norm import LayerNorm, RMSNorm
from napkin.model.transformer import Transformer

COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {
    rms_norm: compiled_rms_norm,
    layer_norm: compiled_layer_norm,
    **COMPILED_ROTATIONS,
    SwiGLU.activate: compiled_swiglu,
    TanhGELU.activate: compiled_gelu_tanh,
    next_token_loss: functools.partial(next_token_loss, compiled=True),
}
"""The compiled form of an operator, by the form that a model has without."""

_ATTRIBUTES = ("normalize", "rotate", "activate", "next_token_loss")
"""Where modules keep their forms."""


def use_compiled_kernels(model: Transformer) -> None:
    """Let the modules of a model compute with the compiled forms; the same numbers, but for the order of sums.

    A norm that only linear layers read then writes what they read: under autocast, numbers of its format.
    """
    for module in model.modules():
        for name in _ATTRIBUTES:
            form = getattr(module, name, None)
            if form is not None and not isinstance(form, nn.Module) and form in COMPILED:
                setattr(module, name, COMPILED[form])
    for block in model.blocks:
        for norm in _norms_before_linears(block):
            norm.normalize = functools.partial(norm.normalize, narrow=True)


def _norms_before_linears(block: nn.Module) -> list[RMSNorm | LayerNorm]:
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
    """Whether a layer's input goes to a plain linear layer alone: not to a router, not through µP's scale."""
    first = getattr(layer, "query_key_value", None) or getattr(layer, "up", None) or getattr(layer, "gate_up", None)
    return type(first) is Linear
