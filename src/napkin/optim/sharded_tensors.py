"""Sharded tensors (torch's DTensor): each rank has a part of the whole, along one or more of its dimensions.

FSDP2 gives each rank some of the rows, tensor parallelism some of the rows or columns, both together rows of rows.
Elementwise updates run on the local part. This module imports nothing of torch.distributed.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

Ranges = tuple[range, ...]
"""Indices in one dimension, as ranges that follow one another without being contiguous."""


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank has, by reference; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_sharded(tensor: Tensor) -> bool:
    """True if it is a part of a tensor that other ranks have parts or copies of."""
    return hasattr(tensor, "device_mesh")


def shards_of(tensor: Tensor) -> int:
    """Into how many parts a tensor is divided among ranks; 1 where each of them has all of it."""
    return math.prod(ranks for _, ranks, _, _ in _divisions(tensor))


def is_divided(tensor: Tensor, *dimensions: int) -> bool:
    """Whether ranks have different indices of one of these dimensions, which may be counted from the last."""
    divided = {dimension for dimension, _, _, _ in _divisions(tensor)}
    return any(dimension % tensor.ndim in divided for dimension in dimensions)


def same_division(tensor: Tensor) -> object:
    """A key that is equal for tensors of one shape that are divided alike."""
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None  # pyright: ignore[reportAttributeAccessIssue]


def indices_of(tensor: Tensor) -> tuple[Ranges, ...]:
    """This rank's indices of the whole tensor, by dimension, in the order of its part.

    As torch divides: into ceil(n / ranks) each, the last ranks having fewer or none.
    """
    indices: list[Ranges] = [(range(size),) for size in tensor.shape]
    for dimension, ranks, place, pieces in _divisions(tensor):
        parts = (_chunk(indices[dimension], pieces, piece) for piece in range(pieces))
        indices[dimension] = joined(each for part in parts for each in _chunk(part, ranks, place))
    assert tuple(sum(map(len, ranges)) for ranges in indices) == tuple(local(tensor).shape)
    return tuple(indices)


def part_like(tensor: Tensor, whole: Tensor) -> Tensor:
    """Of a whole tensor, the part that this rank has of `tensor`, which has the same shape."""
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
    """The same indices, with ranges that continue one another made into one, and empty ones left out."""
    merged: list[range] = []
    for each in ranges:
        if merged and merged[-1].stop == each.start:
            merged[-1] = range(merged[-1].start, each.stop)
        elif each:
            merged.append(each)
    return tuple(merged)


def _divisions(tensor: Tensor) -> list[tuple[int, int, int, int]]:
    """How a tensor is divided, one division after the other: the dimension, the number of ranks, this rank's place
    among them, and into how many pieces the dimension is cut before each of these is divided."""
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
    """One of so many parts of the indices, as torch.chunk makes them."""
    size = sum(map(len, ranges))
    each = -(-size // parts)
    start, stop = min(place * each, size), min((place + 1) * each, size)
    cut: list[range] = []
    for one in ranges:
        cut.append(one[max(0, start) : max(0, stop)])
        start, stop = start - len(one), stop - len(one)
    return joined(cut)
