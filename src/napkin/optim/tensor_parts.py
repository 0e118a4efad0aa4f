"""The parts of tensors that a rank has.

A part is a box of the whole tensor, an offset and a length in every dimension. A rank of FSDP2 has one box of each
tensor, some of its rows. Matrices that are stacked in one parameter are divided matrix by matrix among tensor-parallel
ranks, which then have a box of each.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from napkin.optim.saved_state import indices_of, joined, local


@dataclass(frozen=True)
class Box:
    """A part of a tensor that is contiguous in every dimension."""

    offsets: tuple[int, ...]
    """The index of the first element in the whole tensor."""
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The index after the last element, by dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def within(self, other: "Box") -> tuple[slice, ...] | None:
        """The range within this box of what the two have in common; None where that is nothing."""
        firsts = tuple(map(max, self.offsets, other.offsets))
        lasts = tuple(map(min, self.ends, other.ends))
        if any(first >= last for first, last in zip(firsts, lasts, strict=True)):
            return None
        return tuple(slice(a - own, b - own) for a, b, own in zip(firsts, lasts, self.offsets, strict=True))


@dataclass(frozen=True)
class Part:
    """A box of a tensor that this rank has."""

    tensor: Tensor
    """The elements of the box, a view of the rank's tensor."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the unsharded tensor."""

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(self.tensor.shape))

    @property
    def place(self) -> tuple[slice, ...]:
        """The place of these elements in the whole tensor."""
        return tuple(slice(first, end) for first, end in zip(self.offsets, self.box.ends, strict=True))


Parts = dict[str, list[Part]]
"""The parts of tensors that a rank holds, by name."""


def parts_of(tensor: Tensor, *, heights: Sequence[int] = (), ranks: int = 1) -> list[Part]:
    """The parts of a tensor that this rank holds; empty if it holds no element.

    `heights` are those of matrices stacked in it, in its last dimension but one, which `ranks` have divided one by one:
    its rows are then the first rank's rows of each matrix, followed by those of the second rank. A tensor with another
    number of rows, such as means over them, is not stacked.
    """
    indices = list(indices_of(tensor))
    stacked = max(0, tensor.ndim - 2)
    if ranks > 1 and heights and tensor.shape[stacked] == sum(heights):
        # The rows of stacked matrices in the order of the ranks that hold them.
        order = [
            range(start + rank * (height // ranks), start + (rank + 1) * (height // ranks))
            for rank in range(ranks)
            for start, height in zip([0, *itertools.accumulate(heights)], heights, strict=False)
        ]
        indices[stacked] = joined(each for own in indices[stacked] for each in _select(order, own))
    here = local(tensor)
    # Each range with its beginning in the rank's own tensor.
    places = [zip(itertools.accumulate(map(len, ranges), initial=0), ranges, strict=False) for ranges in indices]
    return [
        Part(
            here[tuple(slice(start, start + len(each)) for start, each in box)],
            tuple(each.start for _, each in box),
            tuple(tensor.shape),
        )
        for box in itertools.product(*places)
    ]


def _select(order: Iterable[range], own: range) -> Iterable[range]:
    """The elements of `order` at the places `own`."""
    first, last = own.start, own.stop
    for each in order:
        yield each[max(0, first) : max(0, last)]
        first, last = first - len(each), last - len(each)


def whole_parts(module: nn.Module) -> Parts:
    """The parameters of a module that a single process has, each in one part."""
    return {name: parts_of(parameter.detach()) for name, parameter in module.named_parameters()}


class MatrixPart(NamedTuple):
    """A part of a tensor seen as a matrix: the matrices of a stack stand one below the other, a vector is a column."""

    first_row: int
    first_column: int
    values: Tensor
    """The rank's own numbers, a view of its tensor, in two dimensions."""


def matrix_parts(parts: Iterable[Part]) -> Iterator[MatrixPart]:
    """The parts of a tensor of at most three dimensions, matrix by matrix."""
    for part in parts:
        if part.tensor.ndim == 3:
            first, first_row, first_column = part.offsets
            for number, matrix in enumerate(part.tensor, start=first):
                yield MatrixPart(number * part.shape[1] + first_row, first_column, matrix)
        elif part.tensor.ndim == 2:
            yield MatrixPart(part.offsets[0], part.offsets[1], part.tensor)
        else:
            yield MatrixPart(part.offsets[0], 0, part.tensor[:, None])
