"""A head of one number: how good a state is, for values and rewards."""

import torch

from napkin.model.linear import Linear
from napkin.model.transformer import Transformer


def add_scalar_head(model: Transformer) -> None:
    """Give a model a head that turns hidden states into one number, which starts at 0 everywhere."""
    weight = model.head_weight
    head = Linear(
        model.config.d_model, 1, bias=True, generator=torch.Generator(), device=weight.device, dtype=weight.dtype
    )
    with torch.no_grad():
        head.weight.zero_()
    model.scalar_head = head
