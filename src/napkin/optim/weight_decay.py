"""Weight decay as part of the gradient (Krogh & Hertz 1991): g ← g + decay · w.

SGD, AdaGrad, RMSProp and Adam use it, as they were published. Rules that divide by the gradient's size divide their
decay by it too; AdamW, Lion, Muon and Adafactor shrink the weight itself instead.
"""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

import torch
from torch import Tensor

from napkin.optim.base import Group


def decayed(gradient: Tensor, parameter: Tensor, group: Group) -> Tensor:
    """The gradient plus the decay; the gradient itself if weight_decay is 0."""
    return gradient.add(parameter, alpha=group["weight_decay"]) if group["weight_decay"] else gradient


def decayed_foreach(gradients: list[Tensor], parameters: list[Tensor], group: Group) -> list[Tensor]:
    """The same for lists."""
    if not group["weight_decay"]:
        return gradients
    return list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
