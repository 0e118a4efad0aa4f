"""What a tensor is underneath: a window of shape and strides onto a storage that others may share."""

import gc
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from napkin.number_formats import FORMATS
from napkin.units import format_bytes

FORMAT_OF = {getattr(torch, number.torch_name): name for name, number in FORMATS.items() if number.torch_name}


@dataclass(frozen=True)
class TensorReport:
    """What `inspect` found; printing it shows a line a fact."""

    format: str
    """Number format: "fp32", "bf16", ..., or torch's name where napkin has none."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements to step over in the storage for the next index, by dimension."""
    offset: int
    """Elements before the first one."""
    contiguous: bool
    """Whether the elements lie in row-major order without gaps."""
    bytes: int
    """Of the elements: their number times the bytes of one."""
    storage_bytes: int
    """Of the storage, which lives until the last tensor onto it is gone."""
    device: str
    shared_with: tuple[str, ...]
    """The other live tensors onto the same storage."""
    view_obstacle: str | None
    """Why `.view(-1)` would fail; None where it would not."""

    def __str__(self) -> str:
        shared = "; ".join(self.shared_with) or "nobody"
        lines = {
            "format": self.format,
            "shape": self.shape,
            "strides": f"{self.strides}, {'contiguous' if self.contiguous else 'not contiguous'}",
            "bytes": f"{self.bytes:,}",
            "storage": f"{self.storage_bytes:,} bytes on {self.device}, read from element {self.offset}",
            "shared with": shared,
            ".view(-1)": "works" if self.view_obstacle is None else f"fails: {self.view_obstacle}",
        }
        return "\n".join(f"{name:<12} {value}" for name, value in lines.items())


def inspect(tensor: Tensor) -> TensorReport:
    """Say what a strided tensor is: format, shape, strides, storage, and who shares it.

    Sharing is looked up among all tensors that Python holds at this moment; those that only the autograd graph or
    C++ holds are not seen.
    """
    return TensorReport(
        format=FORMAT_OF.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        contiguous=tensor.is_contiguous(),
        bytes=tensor.numel() * tensor.element_size(),
        storage_bytes=tensor.untyped_storage().nbytes(),
        device=str(tensor.device),
        shared_with=tuple(sorted(_describe(other) for other in _sharers(tensor))),
        view_obstacle=view_obstacle(tensor, (-1,)),
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`; views share a storage, and a storage counts once.

    >>> a = torch.zeros(4, 8)
    >>> storage_bytes([a, a.T, a[1:]])
    128
    """
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def view_obstacle(tensor: Tensor, shape: Sequence[int]) -> str | None:
    """Why `tensor.view(shape)` would fail, or None where it works; -1 stands for one size to be inferred.

    Dimensions can be merged where stepping to the next index of the outer one is as far as running through all of
    the inner one: stride[i] = stride[i + 1] · size[i + 1].

    >>> view_obstacle(torch.zeros(2, 3).T, (6,))
    'dimensions 0 and 1 cannot be merged: stride 1 is not 2 · 3; .reshape or .contiguous() copies'
    """
    elements, known = tensor.numel(), math.prod(size for size in shape if size != -1)
    if shape.count(-1) > 1:
        return "only one size can be inferred"
    if known != elements and not (-1 in shape and known and elements % known == 0):
        return f"{tuple(shape)} does not hold {elements} elements"
    try:
        tensor.view(tuple(shape))
    except RuntimeError:
        return _first_break(tensor)
    return None


def _first_break(tensor: Tensor) -> str:
    kept = [(index, size, stride) for index, (size, stride) in enumerate(_dimensions(tensor)) if size != 1]
    for (outer, _, far), (inner, size, near) in itertools.pairwise(kept):
        if far != near * size:
            return (
                f"dimensions {outer} and {inner} cannot be merged: stride {far} is not {size} · {near}; "
                ".reshape or .contiguous() copies"
            )
    return "the sizes asked for cut across its dimensions; .reshape copies"


def _dimensions(tensor: Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))


def _sharers(tensor: Tensor) -> list[Tensor]:
    address = tensor.untyped_storage()._cdata
    with warnings.catch_warnings():
        # Asking foreign objects for their type wakes deprecation warnings of modules that resolve names lazily.
        warnings.simplefilter("ignore")
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing is not tensor]
    return [other for other in tensors if other.layout == torch.strided and other.untyped_storage()._cdata == address]


def _describe(tensor: Tensor) -> str:
    kind, shape, strides = type(tensor).__name__, tuple(tensor.shape), tuple(tensor.stride())
    return f"{kind} {shape}, strides {strides}, {format_bytes(tensor.nbytes)}"
