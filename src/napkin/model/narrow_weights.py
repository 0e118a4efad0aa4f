"""A model whose products read copies of its matrices in the format of autocast.

Which linear layers of a model multiply in a format of 8 bits.

Frozen matrices held in the format that products read them in: the same products, in half of the bytes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.kernels.products.linear import linear
from napkin.kernels.products.narrow import Multiply, takes_narrow
from napkin.model.layers import Linear
from napkin.model.moe import DroplessExperts, MixtureOfExperts
from napkin.model.transformer import Transformer, fused_next_token_loss
from napkin.optim.narrow_copies import NarrowCopies


def multiplied_matrices(model: Transformer) -> list[Tensor]:
    """The matrices of a model whose products may read copies: of linear layers, of experts, and the head's."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Linear) and module.multiply is linear and module is not model.head:
            found.append(module.weight)
        elif isinstance(module, DroplessExperts):
            found += (module.up, module.down)
    if model.next_token_loss is fused_next_token_loss:
        found.append(model.head_weight)
    # The update writes copies, and it writes only what is trained.
    return [each for each in found if each.requires_grad and each.is_leaf]


def read_narrow_copies(model: Transformer, copies: NarrowCopies) -> None:
    """Let the products of a model with fused kernels read those copies, where there is autocast and a copy."""
    for module in model.modules():
        if isinstance(module, Linear) and module.multiply is linear:
            module.multiply = functools.partial(_multiply, copies)
        elif isinstance(module, DroplessExperts):
            module.multiply_groups = functools.partial(_multiply_groups, copies, module.multiply_groups)
    if model.next_token_loss is fused_next_token_loss:
        model.next_token_loss = functools.partial(_next_token_loss, copies)


def _multiply(
    copies: NarrowCopies,
    x: Float[Tensor, "*batch in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
) -> Float[Tensor, "*batch out_features"]:
    return linear(x, copies.narrowed(weight), bias)


def _multiply_groups(
    copies: NarrowCopies,
    multiply: Callable[..., Tensor],
    x: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "groups out_features in_features"],
    starts: Int[Tensor, " groups"],
) -> Float[Tensor, "rows out_features"]:
    return multiply(x, copies.narrowed(weight), starts)


def _next_token_loss(
    copies: NarrowCopies, hidden: Tensor, head_weight: Tensor, targets: Tensor, **settings: Any
) -> Tensor:
    return fused_next_token_loss(hidden, head_weight, targets, narrow_weight=copies.of(head_weight), **settings)


def multiply_narrow(blocks: nn.Module, multiply: Multiply) -> None:
    """Let all linear layers inside `blocks` multiply in a form of `napkin.kernels.products.narrow`.

    Routers stay as they are, since their choices depend on small differences, and so do layers whose sizes the
    hardware does not take.
    """
    for name, module in blocks.named_modules():
        if isinstance(module, Linear) and not name.endswith("router") and takes_narrow(module.weight):
            module.multiply = multiply


def hold_frozen_narrow(model: Transformer, dtype: torch.dtype) -> None:
    """Hold the matrices of a model's linear layers that are not trained in `dtype`, that of products under autocast.

    Autocast would cast them for each product: the numbers are the same, fewer bytes are held and read. The embedding,
    gains and biases stay as they are, and routers, which multiply in fp32.
    """
    for _, layer in _narrow_layers(model):
        layer.weight = torch.nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
        if layer.multiply is linear:
            layer.multiply = _held_linear


def narrow_names(model: Transformer) -> list[str]:
    """The parameters that `hold_frozen_narrow` holds in another format."""
    return [f"{name}.weight" for name, _ in _narrow_layers(model)]


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
