"""The step that is counted where none is given: forward pass, loss, backward pass, update; and the module that it runs.

A module may return its loss in any form: alone, first of a tuple, as `.loss` or under "loss", or not at all.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from napkin.errors import NapkinError


def plain_step(
    module: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> Callable[[nn.Module, Any], None]:
    """The step of `module`, with an optimizer of its parameters. A module that has none is run forward alone.

    Raises NapkinError for an optimizer that evaluates the model itself.
    """
    trains = next(module.parameters(), None) is not None
    update = optimizer(module.parameters()) if optimizer and trains else None
    if update is not None and inspect.signature(update.step).parameters["closure"].default is inspect.Parameter.empty:
        raise NapkinError(
            f"{type(update).__name__} evaluates the model inside its update: pass a `step` that gives it a closure"
        )

    def step(module: nn.Module, batch: Any) -> None:
        if isinstance(batch, dict):
            output = module(**batch)
        else:
            output = module(*batch) if isinstance(batch, (tuple, list)) else module(batch)
        loss = _scalar(output)
        if loss is not None:
            loss.backward()
        elif trains:
            raise NapkinError("the model returns no tensor that depends on a parameter: there is nothing to train")
        if update is not None:
            update.step()
        module.zero_grad(set_to_none=True)

    return step


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given, where it is one that it returned."""
    original = getattr(module, "_orig_mod", None)
    return uncompiled(original) if isinstance(original, nn.Module) else module


def uncompile_parts(module: nn.Module) -> nn.Module:
    """Put back what `torch.compile` was given in place of what it returned, everywhere in `module`; returns it."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            setattr(part, name, uncompiled(child))
        if getattr(part, "_compiled_call_impl", None) is not None:
            part._compiled_call_impl = None
    return module


def _scalar(output: Any) -> Tensor | None:
    """The loss that a model returned; otherwise the sum of the means of all that it returned; None without a graph."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [leaf for leaf in _tensors_in(output) if leaf.requires_grad]
    if not leaves:
        return None
    return leaves[0] if leaves[0].dim() == 0 else sum(leaf.float().mean() for leaf in leaves)  # pyright: ignore


def _tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors_in(item)
    elif is_dataclass(output):
        yield from _tensors_in(vars(output))
