"""Parameter groups: which parameters decay, and which are matrices of blocks."""

from typing import Any

from torch import Tensor, nn

from napkin.errors import NapkinError


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: parameters of two or more dimensions with weight_decay, all others with none.

    Decay pulls towards 0, which is neutral for a matrix and not for a gain around 1. A parameter that two modules share
    is listed once; parameters without requires_grad and empty groups are left out.
    """
    return _not_empty(*_by_decay(_trained(model), weight_decay))


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Three groups: matrices inside the blocks ("orthogonal" is True), other matrices, and vectors without decay.

    Blocks are the modules in an `nn.ModuleList`: the layers that a model repeats. Matrices outside of them turn ids
    into vectors or vectors into scores of ids, and their rows are updated as vectors are. Raises NapkinError if a model
    has no matrices in blocks.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {p for stack in stacks for p in stack.parameters() if p.ndim >= 2}
    trained = _trained(model)
    hidden = [p for p in trained if p in inside]
    if not hidden:
        raise NapkinError(
            f"{type(model).__name__} has no matrix inside an nn.ModuleList: muon has nothing to orthogonalise, "
            "use adamw, or name the groups yourself"
        )
    others = _by_decay([p for p in trained if p not in inside], weight_decay)
    return _not_empty(
        {"params": hidden, "weight_decay": weight_decay, "orthogonal": True},
        *({**group, "orthogonal": False} for group in others),
    )


def _trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _by_decay(parameters: list[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _not_empty(*groups: dict[str, Any]) -> list[dict[str, Any]]:
    return [group for group in groups if group["params"]]
