"""Results of operators on fake tensors, cached by the layouts of their arguments.

Shapes, strides and formats of the results follow from those of the arguments. torch's fake tensors have a cache too,
but its lookups take most of the time of a trace. Here the layout of the arguments is one tuple, and a result is an
empty tensor of the layout that the first call returned, a view of the same argument, or that argument itself.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_FAKE = torch._C._TorchDispatchModeKey.FAKE
PLAIN_VALUES = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex}
)
"""Types of arguments that stand for themselves."""
_MOST_CALLS = 2**17
"""The most calls that are cached; once it is reached, all are dropped."""


class _Again(NamedTuple):
    """How to make one result of a call again: a new tensor of a layout, a view of an argument, or the argument
    itself."""

    argument: int | None
    """The number of the argument's tensor whose storage it is in; None for a new storage."""
    shape: tuple[int, ...] | None
    """Shape of the result; None if the result is the argument itself."""
    strides: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    attributes: dict[str, Any] | None = None
    """All that Python keeps of a new fake tensor, but its mode."""


@dataclass(slots=True)
class KnownCall:
    """A call on arguments of certain layouts, whose results can be made again."""

    container: type | None
    """The type of what it returned, if it is a list or a tuple of results."""
    results: tuple[_Again | int | None, ...]
    """Numbers and None are as the first call returned them."""
    facts: Any = None
    """Anything the caller wants to keep with the call that follows from the layouts as well."""


_NEW = object()
_calls: dict[Hashable, KnownCall | None] = {}
"""Known calls by operator and layouts of the arguments; None for calls whose results cannot be made again."""


# Runs for every operator of a step: the type checks that are on during tests would take half of their time.
@no_type_check
def call_on_fakes(operator: Any, args: tuple, kwargs: dict) -> tuple[Any, KnownCall | None]:
    """Call an operator, and return its result with the `KnownCall` that all calls of these layouts share, None where
    there is none. Results and errors are those of torch's fake tensors."""
    mode = torch._C._get_dispatch_mode(_FAKE)
    if (
        mode is None
        or type(mode) is not FakeTensorMode
        or mode.shape_env is not None
        or not mode.cache_enabled
        or mode.propagate_real_tensors
        or torch._C._len_torch_dispatch_stack() != 1
        or not _depends_on_layouts(operator)
    ):
        return operator(*args, **kwargs), None
    tensors: list[FakeTensor] = []
    key = [operator, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
    if not _read(args, mode, tensors, key) or (kwargs and not _read_keywords(kwargs, mode, tensors, key)):
        return operator(*args, **kwargs), None
    key = tuple(key)
    call = _calls.get(key, _NEW)
    if call is None:
        return operator(*args, **kwargs), None
    if call is not _NEW:
        if call.container is None:
            return _make(call.results[0], mode, tensors), call
        return call.container([_make(result, mode, tensors) for result in call.results]), call
    result = operator(*args, **kwargs)
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[key] = call = _call_of(result, mode, tensors)
    return result, call


@no_type_check
def _read(values: Any, mode: FakeTensorMode, tensors: list, key: list) -> bool:
    """Add the layouts of tensors and all other values to `key`; False if there is something else among them."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            held = value.__dict__
            if held["fake_mode"] is not mode or held["constant"] is not None or value.layout is not torch.strided:
                return False
            tensors.append(value)
            key.append(
                (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.untyped_storage().nbytes(),
                    held["_fake_device"],
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    value.is_inference(),
                )
            )
        elif kind in PLAIN_VALUES:
            # 1, 1.0 and True are equal.
            key.append(kind)
            key.append(value)
        elif kind is list or kind is tuple:
            key.append((kind, len(value)))
            if not _read(value, mode, tensors, key):
                return False
        else:
            return False
    return True


@no_type_check
def _read_keywords(keywords: dict, mode: FakeTensorMode, tensors: list, key: list) -> bool:
    key.append(tuple(keywords))
    return _read(keywords.values(), mode, tensors, key)


@no_type_check
def _make(again: _Again | int | None, mode: FakeTensorMode, tensors: list) -> Tensor | int | None:
    if type(again) is not _Again:
        return again
    argument, shape, strides, offset, dtype, device, attributes = again
    if shape is None:
        return tensors[argument]
    with torch._C._DisableTorchDispatch():
        empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if argument is not None:
            empty.set_(tensors[argument].untyped_storage(), offset, shape, strides)
        fake = Tensor._make_subclass(FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=device)
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(attributes)
    fake.__dict__["fake_mode"] = mode
    return fake


@no_type_check
def _call_of(result: Any, mode: FakeTensorMode, tensors: list) -> KnownCall | None:
    """The recipe for making the result again; None where there is none."""
    container = type(result) if type(result) in (list, tuple) else None
    results, new_storages = [], []
    for each in result if container else (result,):
        if each is None or type(each) is int:
            results.append(each)
            continue
        again = _again(each, mode, tensors)
        if again is None:
            return None
        if again.argument is None:
            new_storages.append(each.untyped_storage()._cdata)
        results.append(again)
    # Two results in one new storage.
    return None if len(set(new_storages)) < len(new_storages) else KnownCall(container, tuple(results))


@no_type_check
def _again(result: Any, mode: FakeTensorMode, tensors: list) -> _Again | None:
    if type(result) is not FakeTensor or result.fake_mode is not mode or result.layout is not torch.strided:
        return None
    same = [number for number, tensor in enumerate(tensors) if tensor is result]
    if same:
        # Two arguments that are one tensor: another call may return either.
        return _Again(same[0], None) if len(same) == 1 else None
    storage = result.untyped_storage()
    sharing = [number for number, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage._cdata]
    if len(sharing) > 1 or result.constant is not None or result.requires_grad or result._is_view():
        return None
    attributes = {name: value for name, value in result.__dict__.items() if name != "fake_mode"}
    again = _Again(
        sharing[0] if sharing else None,
        tuple(result.shape),
        tuple(result.stride()),
        result.storage_offset(),
        result.dtype,
        result.fake_device,
        attributes,
    )
    return again if _are_alike(result, _make(again, mode, tensors)) else None


def _are_alike(result: Tensor, again: Tensor) -> bool:
    return all(ask(result) == ask(again) for ask in _QUESTIONS)


_QUESTIONS: tuple[Callable[[Tensor], Any], ...] = (
    lambda tensor: (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype),
    lambda tensor: tensor.untyped_storage().nbytes(),
    torch._C._dispatch_key_set,
    lambda tensor: (tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
    lambda tensor: (tensor.__dict__, type(tensor)),
)


@cache
def _depends_on_layouts(operator: Any) -> bool:
    """True if the results of an operator depend on nothing but the layouts of its arguments, values among them, and it
    changes the layout of none."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace not in ("aten", "prims", "napkin", "fsdp"):
        return False
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    return not tags.intersection(operator.tags) and "lift" not in operator.name()
