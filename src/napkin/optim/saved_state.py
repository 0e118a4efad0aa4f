"""The state dicts that `load_state_dict` takes: of the same optimizer of napkin, or of torch's optimizer of the same
rule.

torch counts steps per parameter, in a tensor of its state, and has other names for some settings. A `TorchTwin` says
which of its settings are ours under which name, and which have to have one value, as the rules differ with another.

Sharded tensors (torch's DTensor): each rank has a part of the whole, along one or more of its dimensions.

FSDP2 gives each rank some of the rows, tensor parallelism some of the rows or columns, both together some rows of some
rows. Elementwise updates run on the local part. This module does not import torch.distributed.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from napkin.errors import NapkinError

Group = dict[str, Any]

# Settings of how torch computes a step, not of its result; and state of its optimizers before their first step.
_LEFT_OUT = frozenset("foreach fused capturable differentiable initial_accumulator_value".split())


@dataclass(frozen=True)
class TorchTwin:
    """torch's optimizer of the same rule."""

    name: str
    """Name of its class in torch.optim."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Settings that have another name here."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings that do not exist here: the values with which the rules are the same."""
    optional: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings as in `fixed` that older versions of torch do not store."""
    unpacked: Callable[[Group], Group] = dict
    """Splits a setting that is several here."""


def in_our_terms(state_dict: Mapping[str, Any], own_groups: list[Group], twin: TorchTwin | None, name: str) -> Group:
    """A state_dict as napkin's optimizers store it; what is napkin's already is returned unchanged.

    `own_groups` are those of the optimizer that loads it, whose class is called `name`. Raises NapkinError if it is not
    the state of that class or of its twin over as many parameters.
    """
    groups = state_dict["param_groups"]
    own_sizes, sizes = ([len(group["params"]) for group in some] for some in (own_groups, groups))
    if own_sizes != sizes:
        raise NapkinError(
            f"the state has groups of {_listed(sizes)} parameters, the optimizer of {_listed(own_sizes)}: give it the "
            "same parameters in the same groups"
        )
    if all("step" in group for group in groups):
        for own, group in zip(own_groups, groups, strict=True):
            for key in own.keys() - group.keys():
                raise NapkinError(f"the state has no {key}, a setting of {name}: it is another optimizer's")
        return dict(state_dict)
    if twin is None:
        raise NapkinError(f"the state is not napkin's: torch has no {name}, whose state could be loaded")
    state: dict[int, dict[str, Any]] = {index: dict(each) for index, each in state_dict["state"].items()}
    translated = [
        _translated(own, group, twin) | {"step": _common_step(group, state), "params": group["params"]}
        for own, group in zip(own_groups, groups, strict=True)
    ]
    # SGD without momentum stores a buffer of None.
    return {
        "state": {
            index: tensors
            for index, each in state.items()
            if (tensors := {key: tensor for key, tensor in each.items() if key != "step" and tensor is not None})
        },
        "param_groups": translated,
    }


def check_tensors(index: int, saved: Mapping[str, Any], expected: Mapping[str, Tensor], name: str) -> None:
    """Raise NapkinError if a parameter's saved tensors have other names or shapes than an optimizer's own."""
    if saved.keys() != expected.keys():
        raise NapkinError(
            f"the state of parameter {index} is {_listed(saved)}, {name} has {_listed(expected)}: it is another "
            "optimizer's, or another parameter's"
        )
    for key, tensor in expected.items():
        if saved[key].shape != tensor.shape:
            raise NapkinError(
                f"{key} of parameter {index} has shape {tuple(saved[key].shape)}, the parameter needs "
                f"{tuple(tensor.shape)}: give the optimizer the same parameters in the same order"
            )


def _translated(own: Group, theirs: Group, twin: TorchTwin) -> Group:
    """A group's settings under our names; those that torch does not have are the optimizer's own."""
    theirs = {key: _plain(value) for key, value in twin.unpacked(theirs).items() if key not in _LEFT_OUT}
    for key, values in {**twin.fixed, **twin.optional}.items():
        if key not in theirs:
            if key in twin.fixed:
                raise NapkinError(f"the state has no {key}: it is neither napkin's nor of torch.optim.{twin.name}")
        elif theirs.pop(key) not in values:
            raise NapkinError(
                f"the state was made with another {key} than {' or '.join(map(str, values))}: napkin has no such rule"
            )
    return own | {twin.renamed.get(key, key): value for key, value in theirs.items()}


def _plain(value: Any) -> Any:
    """Learning rates may be tensors of one number; JSON makes lists of tuples."""
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _common_step(group: Group, state: Mapping[int, Mapping[str, Any]]) -> int:
    """The steps that all parameters of a group took; 0 if it does not say."""
    states = (state.get(index, {}) for index in group["params"])
    steps = {int(torch.as_tensor(each["step"]).item()) for each in states if "step" in each}
    if len(steps) > 1:
        raise NapkinError(
            f"parameters of one group took {_listed(sorted(steps))} steps, napkin counts them per group: put those "
            "with as many steps into one group"
        )
    return steps.pop() if steps else 0


def _listed(values: Any) -> str:
    return ", ".join(map(str, values)) or "none"


Ranges = tuple[range, ...]
"""Indices in one dimension, as ranges that follow one another without being contiguous."""


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank has, by reference; any other tensor unchanged."""
    if not hasattr(tensor, "to_local"):
        return tensor
    # With gradients it would be a view of it.
    with torch.no_grad():
        return tensor.to_local()  # pyright: ignore[reportAttributeAccessIssue]


def is_sharded(tensor: Tensor) -> bool:
    """True if it is a part of a tensor that other ranks have parts or copies of."""
    return hasattr(tensor, "device_mesh")


def shards_of(tensor: Tensor) -> int:
    """The number of parts into which a tensor is divided among ranks; 1 if each rank has all of it."""
    return math.prod(ranks for _, ranks, _, _ in _divisions(tensor))


def is_divided(tensor: Tensor, *dimensions: int) -> bool:
    """True if ranks have different indices of one of these dimensions, which may be counted from the last."""
    divided = {dimension for dimension, _, _, _ in _divisions(tensor)}
    return any(dimension % tensor.ndim in divided for dimension in dimensions)


def same_division(tensor: Tensor) -> object:
    """A key that is equal for tensors of one shape that are divided alike."""
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None  # pyright: ignore[reportAttributeAccessIssue]


def indices_of(tensor: Tensor) -> tuple[Ranges, ...]:
    """This rank's indices of the whole tensor, by dimension, in the order of its part.

    Divided as torch does: ceil(n / ranks) each, with fewer or none for the last ranks.
    """
    indices: list[Ranges] = [(range(size),) for size in tensor.shape]
    for dimension, ranks, place, pieces in _divisions(tensor):
        parts = (_chunk(indices[dimension], pieces, piece) for piece in range(pieces))
        indices[dimension] = joined(each for part in parts for each in _chunk(part, ranks, place))
    assert tuple(sum(map(len, ranges)) for ranges in indices) == tuple(local(tensor).shape)
    return tuple(indices)


def part_like(tensor: Tensor, whole: Tensor) -> Tensor:
    """This rank's part, as divided like `tensor`, of a whole tensor of the same shape."""
    if not is_sharded(tensor):
        return whole
    for dimension, ranges in enumerate(indices_of(tensor)):
        parts = [whole.narrow(dimension, each.start, len(each)) for each in ranges or (range(0),)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dimension)
    return whole


def sharded_like(tensor: Tensor, part: Tensor) -> Tensor:
    """This rank's `part` as a tensor sharded like `tensor`; if that is not sharded, `part` unchanged.

    It may be on another device than `tensor`, to which `DTensor.from_local` would move it.
    """
    if not is_sharded(tensor):
        return part
    sharded = cast(Any, tensor)
    return type(sharded)(part, sharded._spec, requires_grad=False)


def full_tensor(tensor: Tensor, part: Tensor | None = None) -> Tensor:
    """A sharded tensor gathered from all ranks, or one made of each rank's `part` in its place; any other tensor, or
    the part of it, unchanged.

    A collective: all ranks have to call it in the same order.
    """
    if not is_sharded(tensor):
        return tensor if part is None else part
    sharded = cast(Any, tensor)
    gathered = type(sharded).from_local(
        local(tensor) if part is None else part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
    return gathered.full_tensor()


def joined(ranges: Iterable[range]) -> Ranges:
    """The same indices, with adjacent ranges merged and empty ones left out."""
    merged: list[range] = []
    for each in ranges:
        if merged and merged[-1].stop == each.start:
            merged[-1] = range(merged[-1].start, each.stop)
        elif each:
            merged.append(each)
    return tuple(merged)


def _divisions(tensor: Tensor) -> list[tuple[int, int, int, int]]:
    """The divisions of a tensor, one after the other: the dimension, the number of ranks, this rank's place among them,
    and into how many pieces the dimension is cut before each of these is divided."""
    if not is_sharded(tensor):
        return []
    sharded = cast(Any, tensor)
    mesh = sharded.device_mesh
    places = mesh.get_coordinate()
    return [
        # FSDP2 divides what tensor parallelism has divided already: its placement is strided by that.
        (placement.dim, mesh.size(dimension), places[dimension], getattr(placement, "split_factor", 1))
        for dimension, placement in enumerate(sharded.placements)
        if hasattr(placement, "dim")
    ]


def _chunk(ranges: Ranges, parts: int, place: int) -> Ranges:
    """One of several parts of the indices, divided as by torch.chunk."""
    size = sum(map(len, ranges))
    each = -(-size // parts)
    start, stop = min(place * each, size), min((place + 1) * each, size)
    cut: list[range] = []
    for one in ranges:
        cut.append(one[max(0, start) : max(0, stop)])
        start, stop = start - len(one), stop - len(one)
    return joined(cut)
