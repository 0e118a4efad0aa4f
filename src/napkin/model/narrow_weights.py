"""A model whose products read copies of its matrices in the format of autocast."""

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from napkin.kernels.decoding import linear
from napkin.model.linear import Linear
from napkin.model.loss import fused_next_token_loss
from napkin.model.moe import DroplessExperts
from napkin.model.transformer import Transformer
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
