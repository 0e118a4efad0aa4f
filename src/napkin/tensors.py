"""The layout of a tensor: shape and strides over a storage that other tensors may share; numbers on their way between
a device and the host; huge pages; the random state of a device; launches recorded as a CUDA graph."""

import gc
import itertools
import math
import mmap
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from napkin.number_formats import FORMATS
from napkin.units import format_bytes

Result = TypeVar("Result")
Module = TypeVar("Module", bound=torch.nn.Module)

_HUGE_PAGE = 2**21
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SMALLEST_ON_HUGE_PAGES = 2**24
"""Bytes of a module's tensors from which they move: processors hold the addresses of some thousand pages of 4 KiB."""


def on_huge_pages(module: Module) -> Module:
    """Move a module's parameters, and its buffers, side by side onto pages of 2 MiB, where Linux has such pages.

    A matrix that is read once per token is then read at the speed of memory; with pages of 4 KiB the processor waits
    for address translation. Tensors that share memory still do. One tensor at a time is in memory twice.
    """
    for tensors in (module.parameters(), module.buffers()):
        on_cpu = [each for each in tensors if each.device.type == "cpu" and each.untyped_storage().nbytes()]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in on_cpu}
        sizes = {address: -(-storage.nbytes() // 64) * 64 for address, storage in storages.items()}
        if sum(sizes.values()) < _SMALLEST_ON_HUGE_PAGES or (huge := _huge_pages(sum(sizes.values()))) is None:
            continue
        sharing = {address: [each for each in on_cpu if _address_of(each) == address] for address in storages}
        del on_cpu
        for address, first in zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False):
            storage = storages.pop(address)
            to = huge[first : first + storage.nbytes()]
            to.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))  # pyright: ignore
            for each in sharing.pop(address):
                place = int(to.storage_offset()) // each.element_size() + int(each.storage_offset())
                view = torch.empty(0, dtype=each.dtype)
                each.data = view.set_(to.untyped_storage(), place, each.shape, each.stride())  # pyright: ignore
    return module


def zeros_side_by_side(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    """Tensors of zeros; on a CPU, where they are large together, they stand on pages as in `on_huge_pages`."""
    sizes = [-(-math.prod(shape) * dtype.itemsize // 64) * 64 for shape in shapes]
    is_large = torch.device(device).type == "cpu" and sum(sizes) >= _SMALLEST_ON_HUGE_PAGES
    # What looks at operators, or fakes them, sees torch's.
    is_watched = torch._C._len_torch_dispatch_stack() > 0
    if not is_large or is_watched or (huge := _huge_pages(sum(sizes))) is None:
        return [torch.zeros(tuple(shape), dtype=dtype, device=device) for shape in shapes]
    # The system gives pages of zeros.
    parts = (part[: math.prod(shape) * dtype.itemsize] for part, shape in zip(huge.split(sizes), shapes, strict=True))
    return [part.view(dtype).view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _huge_pages(n_bytes: int) -> Tensor | None:
    """A tensor of `n_bytes` bytes that begins at a huge page (2 MiB); None where the system has no huge pages."""
    try:
        if "[never]" in _HUGE_PAGES.read_text():
            return None
        # Not from the allocator: memory that was used before has small pages already.
        memory = mmap.mmap(-1, n_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        return None
    made = torch.frombuffer(memory, dtype=torch.uint8)
    return made[-made.data_ptr() % _HUGE_PAGE :][:n_bytes]


class HostCopy:
    """A copy of a tensor in host memory, which is waited for only when it is read."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copy = tensor.detach()
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Any]:
        """The numbers, as `tolist` gives them; nothing is waited for if the device has passed the copy already."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()


def random_state_kept(device_type: str) -> AbstractContextManager[None]:
    """Put back the random state of the CPU, and of this process's GPU where it is used, at the end of the block."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if device_type == "cuda" else [])


def record_graph(
    run: Callable[[], Result], stream: torch.cuda.Stream, pool: Any = None
) -> tuple[Result, Callable[[], object]]:
    """Record what `run` launches on a GPU as a CUDA graph, after a first run on the same stream, where libraries build
    kernels and allocate workspaces. Return what `run` returned, and what launches the same into it again.

    Graphs of one stream and `pool`, a handle of torch's, share the memory of what is between their inputs and outputs:
    one runs at a time. Raises RuntimeError where something cannot be recorded, such as a wait of the host.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = run()
    return result, graph.replay


def together(*numbers: Tensor) -> Tensor:
    """Single numbers in one tensor on the host, in fp64: a GPU is waited for once."""
    device = numbers[0].device
    return torch.stack([number.detach().to(device, torch.float64) for number in numbers]).cpu()


def numbers_of(*numbers: Tensor) -> list[float]:
    """Single numbers as Python's, read together."""
    return together(*numbers).tolist()


def sent_to(device: torch.device | str, tensor: Tensor) -> Tensor:
    """The tensor on a device; a copy to a GPU is queued behind its work, and the host does not wait for it."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


FORMAT_OF = {getattr(torch, number.torch_name): name for name, number in FORMATS.items() if number.torch_name}


@dataclass(frozen=True)
class TensorReport:
    """The result of `inspect`; prints one fact per line."""

    format: str
    """Number format: "fp32", "bf16", ..., or torch's name if napkin has none."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Distance in the storage from one index to the next, in elements, by dimension."""
    offset: int
    """Elements in the storage before the tensor's first."""
    contiguous: bool
    """True if the elements are in row-major order without gaps."""
    bytes: int
    """Number of elements times the bytes of one element."""
    storage_bytes: int
    """Bytes of the storage, which is freed with the last tensor that uses it."""
    device: str
    shared_with: tuple[str, ...]
    """The other live tensors that use the same storage."""
    view_obstacle: str | None
    """Why `.view(-1)` would fail; None if it works."""

    def __str__(self) -> str:
        shared = "; ".join(self.shared_with) or "no other tensor"
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


@dataclass(frozen=True)
class SharingReport:
    """The result of `inspect` for several tensors; prints a line per tensor, its storage and what it shares."""

    tensors: dict[str, TensorReport]
    storages: tuple[tuple[str, ...], ...]
    """Names of the tensors by storage, in the order of the arguments."""
    overlaps: tuple[tuple[str, str, int], ...]
    """Pairs of tensors with common elements, and the bytes of these."""
    bytes: int
    """Bytes of the tensors, one by one."""
    storage_bytes: int
    """Bytes of their storages, each counted once: the memory that they keep allocated."""

    def __str__(self) -> str:
        width = max((len(name) for name in self.tensors), default=0)
        lines = []
        for number, names in enumerate(self.storages, 1):
            for name in names:
                each = self.tensors[name]
                what = f"{each.format} {each.shape}, strides {each.strides}, from element {each.offset}"
                lines.append(f"{name:<{width}}  {what}, {each.bytes:,} bytes of storage {number}")
        lines += [f"{one} and {other} share {shared:,} bytes" for one, other, shared in self.overlaps]
        lines.append(f"{self.bytes:,} bytes in tensors, {self.storage_bytes:,} in {len(self.storages)} storages")
        return "\n".join(lines)


@overload
def inspect(tensor: Tensor, /) -> TensorReport: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def inspect(*tensors: Tensor, **named: Tensor) -> SharingReport: ...
def inspect(*tensors: Tensor, **named: Tensor) -> TensorReport | SharingReport:
    """Describe a strided tensor: format, shape, strides, storage, and the tensors that share it; or several tensors,
    with names or without, and which memory they share.

    The tensors that share the storage are found among all that Python holds at this moment; those that only the
    autograd graph or C++ holds are not seen.

    >>> a = torch.zeros(4, 8)
    >>> print(inspect(a=a, row=a[1], other=torch.zeros(2)))
    a      fp32 (4, 8), strides (8, 1), from element 0, 128 bytes of storage 1
    row    fp32 (8,), strides (1,), from element 8, 32 bytes of storage 1
    other  fp32 (2,), strides (1,), from element 0, 8 bytes of storage 2
    a and row share 32 bytes
    168 bytes in tensors, 136 in 2 storages
    """
    if len(tensors) == 1 and not named:
        return _report(tensors[0], _live_tensors())
    given = {f"tensor {number}": tensor for number, tensor in enumerate(tensors, 1)} | named
    live = _live_tensors()
    reports = {name: _report(tensor, live) for name, tensor in given.items()}
    storages: dict[int, list[str]] = {}
    for name, tensor in given.items():
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    pairs = [pair for names in storages.values() for pair in itertools.combinations(names, 2)]
    overlaps = [(one, other, _common_bytes(given[one], given[other])) for one, other in pairs]
    return SharingReport(
        tensors=reports,
        storages=tuple(map(tuple, storages.values())),
        overlaps=tuple(each for each in overlaps if each[2]),
        bytes=sum(each.bytes for each in reports.values()),
        storage_bytes=storage_bytes(given.values()),
    )


def _common_bytes(one: Tensor, other: Tensor) -> int:
    """Bytes of a storage that both tensors have."""
    first, second = _places(one), _places(other)
    if len(second) < len(first):
        first, second = second, first
    return int(np.isin(first, second, assume_unique=True).sum())


def _places(tensor: Tensor) -> NDArray[np.int64]:
    """The bytes of its storage that a tensor has, each once."""
    size = tensor.element_size()
    places = np.asarray([tensor.storage_offset()], dtype=np.int64)
    for length, stride in _dimensions(tensor):
        # An expanded tensor stores each element once.
        steps = np.arange(length if stride else min(length, 1), dtype=np.int64) * stride
        places = (places[:, None] + steps).ravel()
    return np.unique((size * places[:, None] + np.arange(size)).ravel())


def _report(tensor: Tensor, live: list[Tensor]) -> TensorReport:
    return TensorReport(
        format=FORMAT_OF.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        contiguous=tensor.is_contiguous(),
        bytes=tensor.numel() * tensor.element_size(),
        storage_bytes=tensor.untyped_storage().nbytes(),
        device=str(tensor.device),
        shared_with=tuple(sorted(_describe(other) for other in live if _shares(tensor, other))),
        view_obstacle=view_obstacle(tensor, (-1,)),
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of `tensors`; views share a storage, which counts once.

    >>> a = torch.zeros(4, 8)
    >>> storage_bytes([a, a.T, a[1:]])
    128
    """
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def tensors_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of the names, formats, shapes and bytes of tensors, in hexadecimal digits."""
    digest = sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def view_obstacle(tensor: Tensor, shape: Sequence[int]) -> str | None:
    """Why `tensor.view(shape)` would fail, or None if it works; a size of -1 is inferred.

    Two dimensions can be merged if one step of the outer is as far as all steps of the inner:
    stride[i] = stride[i + 1] · size[i + 1].

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
    return "the requested sizes split its dimensions in a way that strides cannot describe; .reshape copies"


def _dimensions(tensor: Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))


def _live_tensors() -> list[Tensor]:
    """All strided tensors that Python holds."""
    with warnings.catch_warnings():
        # Looking at the type of arbitrary objects triggers deprecation warnings of modules that resolve names lazily.
        warnings.simplefilter("ignore")
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return [tensor for tensor in tensors if tensor.layout == torch.strided]


def _shares(tensor: Tensor, other: Tensor) -> bool:
    return other is not tensor and other.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def _describe(tensor: Tensor) -> str:
    kind, shape, strides = type(tensor).__name__, tuple(tensor.shape), tuple(tensor.stride())
    return f"{kind} {shape}, strides {strides}, {format_bytes(tensor.nbytes)}"
