"""Starts a model that no rank holds whole: it is built on the meta device and divided, and each rank allocates and
fills its own part. All ranks draw the same stream of random numbers as a single process would, a few at a time, and
keep their own. So the host holds at most `PIECE` numbers and, without a GPU, a rank's shard.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from napkin.model.layers import Draw, cut_off_normal_, uniform_
from napkin.optim.tensor_parts import Part, Parts, matrix_parts

PIECE = 2**20
"""Random numbers that are drawn at a time."""


def allocate(modules: Iterable[nn.Module], device_type: str) -> None:
    """Allocate the parameters of modules that are on the meta device, or this rank's shards of them."""

    def allocated(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device_type) if tensor.is_meta else tensor

    for module in modules:
        # FSDP2 keeps views of its shards, which it renews there.
        module._apply(allocated)


@torch.no_grad()
def draw_parts(draws: Mapping[str, Draw], parts: Parts) -> None:
    """Fill a rank's parts of parameters with the numbers that `truncated_normal` would have drawn for the whole.

    `draws` are in the order in which they are drawn; numbers of parameters that another rank holds are drawn and
    dropped.
    """
    for name, draw in draws.items():
        shape = draw.parameter.shape
        width = shape[-1]
        rows, height = shape.numel() // width, max(1, PIECE // width)
        own = list(matrix_parts(parts.get(name, ())))
        piece = torch.empty(min(height, rows), width)
        for start in range(0, rows, height):
            drawn = uniform_(piece[: rows - start], draw.generator)
            for part in own:
                first, last = max(part.first_row, start), min(part.first_row + len(part.values), start + len(drawn))
                if first < last:
                    columns = slice(part.first_column, part.first_column + part.values.shape[1])
                    numbers = drawn[first - start : last - start, columns].clone(memory_format=torch.contiguous_format)
                    here = part.values[first - part.first_row : last - part.first_row]
                    here.copy_(cut_off_normal_(numbers, draw.std))


def zero_parts(parts: Iterable[Part]) -> None:
    """Set parts to 0."""
    for part in parts:
        part.tensor.zero_()
