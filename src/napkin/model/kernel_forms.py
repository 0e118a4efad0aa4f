"""Chooses the forms in which a model's operators and products are computed, and sets them as attributes of its modules.

Operators between products are napkin's compiled loops on a CPU, its fused kernels on a GPU. Products read copies of
matrices in autocast's format, or frozen matrices that are stored in it, or are computed in 8 bits.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from napkin.kernels.attention.by_tiles import MULTIPLE, multiplies_pairs
from napkin.kernels.loss.log_probabilities import linear_log_probabilities
from napkin.kernels.norms.normalization import compiled_rms_norm, fused_layer_norm, fused_rms_norm, layer_norm, rms_norm
from napkin.kernels.operators import triton_obstacle
from napkin.kernels.pointwise.activations import compiled_gelu_tanh, compiled_swiglu, fused_gelu_tanh, fused_swiglu
from napkin.kernels.pointwise.rotary import COMPILED_ROTATIONS, FUSED_ROTATIONS
from napkin.kernels.products.grouped import fused_grouped_matmul, grouped_matmul
from napkin.kernels.products.linear import Multiply, linear, takes_narrow
from napkin.model.attention import CompiledAttention, FusedAttention
from napkin.model.block import Block, ParallelBlock, PostNormBlock, ReorderedBlock
from napkin.model.compiled_blocks import CompiledBlocks
from napkin.model.config import ModelConfig
from napkin.model.decoding_step import DecodingStep, decoded
from napkin.model.feed_forward import DroplessExperts, MixtureOfExperts, SwiGLU, TanhGELU
from napkin.model.layers import Linear
from napkin.model.norm import LayerNorm, RMSNorm
from napkin.model.transformer import Transformer, fused_next_token_loss, next_token_loss
from napkin.optim.narrow_copies import NarrowCopies

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


@contextmanager
def compiled_passes(model: Transformer) -> Iterator[None]:
    """While it lasts, a model in bf16 on a CPU computes with the compiled forms, and attention that is torch's fused
    operator does so in tiles, where the processor and the heads suit."""
    config = model.config
    passes: list[Any] = []
    suits = config.positions != "alibi" and config.kv_lora_rank is None and not config.resolved_head_dim % MULTIPLE
    if suits and multiplies_pairs():
        passes = [each for each in model.modules() if type(getattr(each, "attend", None)) is FusedAttention]
    before: list[FusedAttention] = [each.attend for each in passes]
    # Layers that see the same tokens share one, and what it prepares.
    compiled_attentions = {
        each: CompiledAttention(each.n_heads, scale=each.scale, sees=each.sees, softcap=each.softcap) for each in before
    }
    try:
        for module, attend in zip(passes, before, strict=True):
            module.attend = compiled_attentions[attend]
        with compiled_kernels(model):
            yield
    finally:
        for module, attend in zip(passes, before, strict=True):
            module.attend = attend


def replacements(model: Transformer, forms: Forms) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
    """The modules of a model with one of those forms, the attribute that holds it, and its replacement. The form of a
    norm that only linear layers read gets `narrow`.
    """
    narrow = {norm for block in model.blocks for norm in _norms_before_linears(block)}
    replaced: list[tuple[nn.Module, str, Callable[..., Any]]] = []
    for module in model.modules():
        for name in _ATTRIBUTES:
            form = getattr(module, name, None)
            if form is None or isinstance(form, nn.Module) or form not in forms:
                continue
            new = forms[form]
            replaced.append((module, name, functools.partial(new, narrow=True) if module in narrow else new))
    return replaced


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
    first = next((getattr(layer, name) for name in _FIRST_PRODUCTS if hasattr(layer, name)), None)
    return type(first) is Linear


_FIRST_PRODUCTS = ("query_key_value", "latents", "query", "up", "gate_up")


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


def use_kernels(model: Transformer, kernels: str) -> None:
    """Let the modules of a model compute with the forms that training.kernels names."""
    if kernels == "compiled":
        use_compiled_kernels(model)
    elif kernels == "triton":
        use_triton_kernels(model)


def use_decoding_kernels(model: Transformer) -> str | None:
    """Let blocks compute single new tokens of a few sequences by the launches of `napkin.kernels.decoding`, where
    Triton runs on the model's device, and on a CPU few new tokens in one compiled pass. Return why the launches are
    not used; None if they are, by all blocks."""
    if model.decode_blocks is None and model.device.type == "cpu":
        model.decode_blocks = CompiledBlocks()
    if isinstance(model.run_block, functools.partial) and model.run_block.func is decoded:
        return None
    if (obstacle := triton_obstacle(model.device.type)) is not None:
        return obstacle
    obstacles = {block: DecodingStep.obstacle(block) for block in model.blocks}
    steps = {block: DecodingStep(cast(Block, block)) for block, reason in obstacles.items() if reason is None}
    if steps:
        model.run_block = functools.partial(decoded, steps, model.run_block)
    return next((reason for reason in obstacles.values() if reason is not None), None)


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


def multiplied_matrices(model: Transformer) -> list[Tensor]:
    """The matrices of a model whose products may read copies: of linear layers, of experts, and the head's."""
    matrices: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Linear) and module.multiply is linear and module is not model.head:
            matrices.append(module.weight)
        elif isinstance(module, DroplessExperts):
            matrices += (module.up, module.down)
    if model.next_token_loss is fused_next_token_loss:
        matrices.append(model.head_weight)
    # The update writes copies, and it writes only what is trained.
    return [each for each in matrices if each.requires_grad and each.is_leaf]


def read_narrow_copies(model: Transformer, copies: NarrowCopies) -> None:
    """Let the products of a model with fused kernels read those copies, where there is autocast and a copy."""
    for module in model.modules():
        if isinstance(module, Linear) and module.multiply is linear:
            module.multiply = functools.partial(_multiply_copy, copies, linear)
        elif isinstance(module, DroplessExperts):
            module.multiply_groups = functools.partial(_multiply_copy, copies, module.multiply_groups)
    if model.next_token_loss is fused_next_token_loss:
        model.next_token_loss = functools.partial(_next_token_loss, copies)


def _multiply_copy(
    copies: NarrowCopies, multiply: Callable[..., Tensor], x: Tensor, weight: Tensor, *more: Tensor | None
) -> Tensor:
    return multiply(x, copies.narrowed(weight), *more)


def _next_token_loss(
    copies: NarrowCopies, hidden: Tensor, head_weight: Tensor, targets: Tensor, **settings: Any
) -> Tensor:
    return fused_next_token_loss(hidden, head_weight, targets, narrow_weight=copies.of(head_weight), **settings)


def multiply_narrow(blocks: nn.Module, multiply: Multiply) -> None:
    """Let all linear layers inside `blocks` multiply in a form of `napkin.kernels.products.linear`.

    Routers stay as they are, since their choices depend on small differences, and so do layers whose sizes the
    hardware does not take.
    """
    for name, module in blocks.named_modules():
        if isinstance(module, Linear) and not name.endswith("router") and takes_narrow(module.weight):
            module.multiply = multiply


def hold_frozen_narrow(model: Transformer, dtype: torch.dtype) -> None:
    """Store the frozen matrices of a model's linear layers in `dtype`, the format of products under autocast. Autocast
    would cast them for each product: results are the same, with fewer bytes stored and read. The embedding, gains and
    biases are not changed, nor are routers, which multiply in fp32.
    """
    for _, layer in _narrow_layers(model):
        layer.weight = torch.nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
        if layer.multiply is linear:
            layer.multiply = _held_linear


def _narrow_layers(model: Transformer) -> list[tuple[str, Linear]]:
    routers = {module.router for module in model.modules() if isinstance(module, MixtureOfExperts)}
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module not in routers and not module.weight.requires_grad
    ]


def _held_linear(
    x: Float[Tensor, "*batch in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
) -> Float[Tensor, "*batch out_features"]:
    """The product, without autocast in the input's format."""
    if not torch.is_autocast_enabled(x.device.type):
        weight = weight.to(x.dtype)
    return linear(x, weight, bias)
