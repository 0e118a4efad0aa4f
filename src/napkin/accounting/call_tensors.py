"""The tensors of one operator call: those that it takes and returns, views among them, and those that it writes to."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from napkin.accounting.fake_results import PLAIN_VALUES

aten = torch.ops.aten


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    tensors: list[Tensor] = []
    pending = [value]
    while pending:
        item = pending.pop()
        kind = type(item)
        if kind is FakeTensor:
            tensors.append(item)
        elif kind in PLAIN_VALUES:
            continue
        elif isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, (tuple, list)):
            pending.extend(reversed(item))
        elif isinstance(item, dict):
            pending.extend(reversed(item.values()))
    return tensors


def is_view_call(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """True if all that the call returns are views of its inputs: nothing was read, nothing written."""
    shared = {tensor.untyped_storage()._cdata for tensor in inputs}
    return bool(outputs) and all(
        output.untyped_storage()._cdata in shared and not any(output is tensor for tensor in inputs)
        for output in outputs
    )


def mutated_tensors(operator: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The tensors that an operator without outputs writes to (the foreach family)."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


# What autograd does in place, unless a dispatch mode is active: it adds gradients of the same tensor, and puts those of
# picked numbers into zeros.
_IN_PLACE_UNWATCHED = frozenset({aten.add, aten.scatter, aten.scatter_add, aten.index_put, aten.index_add})


def sums_gradients(operator: Any, inputs: list[Tensor], *, in_backward: bool) -> bool:
    """True if autograd would do this in place if nothing were recorded."""
    # A view is referred to by its base too, so it is never added to in place.
    return in_backward and operator.overloadpacket in _IN_PLACE_UNWATCHED and bool(inputs) and not inputs[0]._is_view()
