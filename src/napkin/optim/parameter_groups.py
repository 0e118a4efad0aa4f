"""Which parameters decay: matrices do, vectors do not."""

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: parameters of two or more dimensions with weight_decay, all others with none.

    Decay pulls towards 0, which is a neutral place for a matrix and not for a gain around 1. A parameter that two
    modules share is listed once, one that takes no gradient not at all, an empty group is left out.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
