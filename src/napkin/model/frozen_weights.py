"""Frozen matrices held in the format that products read them in: the same products, in half of the bytes."""

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.decoding import linear
from napkin.model.linear import Linear
from napkin.model.moe import MixtureOfExperts
from napkin.model.transformer import Transformer


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
