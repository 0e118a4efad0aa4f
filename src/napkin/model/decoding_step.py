"""A block's step of decoding in a few launches: its norms and matrices as `napkin.kernels.decoding` takes them."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from napkin.kernels.attention.decode import Slots, attend_to_splits
from napkin.kernels.decoding.block_step import (
    MOST_VECTORS,
    Activation,
    HeadForm,
    Norm,
    Product,
    add_product,
    project_activation,
    project_heads,
    reads_vectors,
)
from napkin.kernels.pointwise.rotary import COMPILED_ROTATIONS, FUSED_ROTATIONS, rotate_halves, rotate_interleaved
from napkin.kernels.products.linear import linear
from napkin.model.attention import CausalSelfAttention, ForwardContext
from napkin.model.block import Block, ParallelBlock
from napkin.model.feed_forward import (
    GEGLU,
    GELU,
    GLU,
    FeedForward,
    GatedFeedForward,
    ReGLU,
    ReLU,
    SiLU,
    SquaredReLU,
    SwiGLU,
    TanhGEGLU,
    TanhGELU,
)
from napkin.model.layers import Linear, MuPLinear
from napkin.model.norm import HeadQKNorm, LayerNorm, NoQKNorm, RMSNorm
from napkin.model.positions import unrotated
from napkin.model.quantized import Int8Linear

_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    ReLU: "relu",
    ReGLU: "relu",
    SquaredReLU: "relu_squared",
    GELU: "gelu",
    GEGLU: "gelu",
    TanhGELU: "gelu_tanh",
    TanhGEGLU: "gelu_tanh",
    SiLU: "silu",
    SwiGLU: "silu",
    GLU: "sigmoid",
}
_HALVES = (rotate_halves, COMPILED_ROTATIONS[rotate_halves], FUSED_ROTATIONS[rotate_halves])
_NEIGHBOURS = (rotate_interleaved, COMPILED_ROTATIONS[rotate_interleaved], FUSED_ROTATIONS[rotate_interleaved])


class DecodingStep:
    """Computes a block for one new token of each sequence; parameters are read where the block has them."""

    def __init__(self, block: Block | ParallelBlock) -> None:
        self.block = block
        self.activation: Activation = _ACTIVATIONS[type(block.feed_forward)]

    @staticmethod
    def obstacle(block: nn.Module) -> str | None:
        """Why a block has no decoding step; None if it has one."""
        if type(block) not in (Block, ParallelBlock):
            return f"its blocks are {type(block).__name__}, whose norms come after products"
        block = cast(Block | ParallelBlock, block)
        attention = block.attention
        if type(attention) is not CausalSelfAttention:
            return f"its attention is {type(attention).__name__}"
        if type(block.feed_forward) not in _ACTIVATIONS:
            return f"its feed-forward layer is {type(block.feed_forward).__name__}"
        norms = [block.norm] if isinstance(block, ParallelBlock) else [block.attention_norm, block.feed_forward_norm]
        if any(type(norm) not in (RMSNorm, LayerNorm) for norm in norms):
            return "it has no norm before its products"
        of_heads = attention.qk_norm
        if isinstance(of_heads, HeadQKNorm):
            if type(of_heads.query_norm) is not RMSNorm:
                return "the norm of its queries and keys is not an RMSNorm"
        elif type(of_heads) is not NoQKNorm:
            return "queries of all heads are normed together"
        if attention.rotate not in (unrotated, *_HALVES, *_NEIGHBOURS):
            return "its rotation has no kernel"
        if not all(map(_is_read, (attention.query_key_value, attention.output, *_matrices(block.feed_forward)))):
            return "its matrices have adapters, or are multiplied in another format"
        return None

    def takes(self, x: Tensor, context: ForwardContext) -> bool:
        """True where one new token of each of a few sequences is compared with keys in their blocks."""
        projection = cast(CausalSelfAttention, self.block.attention).query_key_value
        return (
            isinstance(context.mask, Slots)
            and context.shared is None
            and len(x) <= MOST_VECTORS
            and reads_vectors(x.device, x.dtype)
            and not torch.is_autocast_enabled(x.device.type)
            and (isinstance(projection, Int8Linear) or x.dtype == projection.weight.dtype)
            and not self.block.training
        )

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """The residual stream [sequence, 1, d_model] after the block."""
        block, attention = self.block, cast(CausalSelfAttention, self.block.attention)
        assert context.cache is not None
        new = context.cache.new_slots(context.layer, context.mask.scales)
        rows = x[:, 0].contiguous()
        parallel = isinstance(block, ParallelBlock)
        before = _norm(block.norm if parallel else block.attention_norm)
        queries = project_heads(rows, before, _product(attention.query_key_value), _form(attention, context), new)
        softcap = attention.attend.softcap
        mixed = attend_to_splits(queries, new.keys, new.values, context.mask, attention.attend.scale, softcap)
        attended = add_product(*mixed, _product(attention.output), rows)
        gated = isinstance(block.feed_forward, GatedFeedForward)
        up, down = _matrices(block.feed_forward)
        # Both branches of a parallel block read what the block has read.
        read, norm = (rows, before) if parallel else (attended, _norm(block.feed_forward_norm))
        inner = project_activation(read, norm, _product(up), self.activation, gated=gated)
        return add_product(inner[:, None, None], None, _product(down), attended)[:, None]


def decoded(
    steps: dict[nn.Module, DecodingStep],
    otherwise: Callable[[nn.Module, Tensor, ForwardContext], Tensor],
    block: nn.Module,
    x: Tensor,
    context: ForwardContext,
) -> Tensor:
    """Run a block by its decoding step where that takes x, and otherwise as before."""
    step = steps.get(block)
    if step is None or not step.takes(x, context):
        return otherwise(block, x, context)
    return step(x, context)


def _is_read(layer: nn.Module) -> bool:
    if isinstance(layer, Int8Linear):
        # Integers of a file may have scales of groups.
        return layer.scales.ndim == 1
    return type(layer) in (Linear, MuPLinear) and layer.adapter is None and layer.multiply is linear


def _matrices(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    layer = cast(FeedForward | GatedFeedForward, layer)
    return layer.gate_up if isinstance(layer, GatedFeedForward) else layer.up, layer.down


def _norm(norm: nn.Module) -> Norm:
    norm = cast(RMSNorm | LayerNorm, norm)
    return Norm(norm.gain, getattr(norm, "bias", None), norm.eps, isinstance(norm, LayerNorm))


def _product(layer: nn.Module) -> Product:
    if isinstance(layer, Int8Linear):
        return Product([layer.values, layer.scales], layer.bias)
    layer = cast(Linear, layer)
    return Product([layer.weight], layer.bias, getattr(layer, "multiplier", 1.0))


def _form(attention: CausalSelfAttention, context: ForwardContext) -> HeadForm:
    query_gain, key_gain, eps = None, None, 0.0
    if isinstance(attention.qk_norm, HeadQKNorm):
        query_norm, key_norm = cast(RMSNorm, attention.qk_norm.query_norm), cast(RMSNorm, attention.qk_norm.key_norm)
        query_gain, key_gain, eps = query_norm.gain, key_norm.gain, query_norm.eps
    cosines, signed_sines = None, None
    if attention.rotate is not unrotated:
        cosines, signed_sines = (table.flatten(0, -2).contiguous() for table in context.rotation)
    interleaved = attention.rotate in _NEIGHBOURS
    return HeadForm(attention.n_heads, query_gain, key_gain, eps, cosines, signed_sines, interleaved)
