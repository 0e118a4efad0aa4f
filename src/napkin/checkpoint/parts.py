"""The parts of tensors that a rank has, each a box of the whole: an offset and a length in every dimension.

A rank of FSDP2 has one box of each tensor, some of its rows. Matrices that are stacked in one parameter are divided
matrix by matrix among tensor-parallel ranks, which then have a box of each.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from napkin.optim.sharded_tensors import Ranges, indices_of, joined, local


@dataclass(frozen=True)
class Box:
    """A part of a tensor that is contiguous in every dimension."""

    offsets: tuple[int, ...]
    """Of its first element in the whole tensor."""
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The index after its last one, by dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def within(self, other: "Box") -> tuple[slice, ...] | None:
        """Where what the two have in common lies in this one; None where they have nothing in common."""
        firsts = tuple(map(max, self.offsets, other.offsets))
        lasts = tuple(map(min, self.ends, other.ends))
        if any(first >= last for first, last in zip(firsts, lasts, strict=True)):
            return None
        return tuple(slice(a - own, b - own) for a, b, own in zip(firsts, lasts, self.offsets, strict=True))


@dataclass(frozen=True)
class Part:
    """A box of a tensor that this rank has."""

    tensor: Tensor
    """Its elements, a view of the rank's tensor."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def box(self) -> Box:
        """Where it lies in the whole."""
        return Box(self.offsets, tuple(self.tensor.shape))


Parts = dict[str, list[Part]]
"""The parts of tensors that a rank has, by name."""


def is_whole(parts: Sequence[Part]) -> bool:
    """Whether these parts are one, which is the whole tensor."""
    return len(parts) == 1 and tuple(parts[0].tensor.shape) == parts[0].shape


def parts_of(tensor: Tensor, *, heights: Sequence[int] = (), ranks: int = 1) -> list[Part]:
    """The parts of a tensor that this rank has; none if it has no element of it.

    `heights` are those of matrices stacked in it, in its last dimension but one, which `ranks` have divided one by one:
    its rows are then those that the first rank has of each matrix, followed by those of the second rank. A tensor with
    another number of rows, such as means over them, is not stacked.
    """
    indices = list(indices_of(tensor))
    stacked = max(0, tensor.ndim - 2)
    if ranks > 1 and heights and tensor.shape[stacked] == sum(heights):
        order = _order_of_stacked(heights, ranks)
        indices[stacked] = joined(each for own in indices[stacked] for each in _select(order, own))
    here = local(tensor)
    places = [list(_places(ranges)) for ranges in indices]
    return [
        Part(
            here[tuple(slice(start, start + len(each)) for start, each in box)],
            tuple(each.start for _, each in box),
            tuple(tensor.shape),
        )
        for box in itertools.product(*places)
    ]


def _order_of_stacked(heights: Sequence[int], ranks: int) -> Ranges:
    """The rows of stacked matrices in the order in which ranks have them."""
    starts = [0, *itertools.accumulate(heights)]
    return tuple(
        range(start + rank * (height // ranks), start + (rank + 1) * (height // ranks))
        for rank in range(ranks)
        for start, height in zip(starts, heights, strict=False)
    )


def _select(order: Ranges, own: range) -> Iterable[range]:
    """The elements of `order` at the places `own`."""
    first, last = own.start, own.stop
    for each in order:
        yield each[max(0, first) : max(0, last)]
        first, last = first - len(each), last - len(each)


def _places(ranges: Ranges) -> Iterable[tuple[int, range]]:
    """Each range with where it begins in the rank's own tensor."""
    start = 0
    for each in ranges:
        yield start, each
        start += len(each)


def first_fault(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[int, ...] | None:
    """The first index of a tensor that is in none of the boxes or in several; None where each is in exactly one.

    All boxes have to lie within `shape`.
    """
    if not shape:
        return None if len(boxes) == 1 else ()
    waiting = sorted(boxes, key=lambda box: box.offsets[0], reverse=True)
    edges = {0, shape[0], *(box.offsets[0] for box in boxes), *(box.ends[0] for box in boxes)}
    inside: list[Box] = []
    for first in sorted(edges - {shape[0]}):
        inside = [box for box in inside if box.ends[0] > first]
        while waiting and waiting[-1].offsets[0] <= first:
            inside.append(waiting.pop())
        fault = first_fault([Box(box.offsets[1:], box.sizes[1:]) for box in inside], shape[1:])
        if fault is not None:
            return first, *fault
    return None
