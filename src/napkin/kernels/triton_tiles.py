"""The tiles of the Triton kernels: how many numbers a program holds at a time, and how many threads it has.

A tile has to fit into the registers of its threads: a compiler that runs out of them spills to memory, and the kernel
becomes several times slower. The sizes below spill nothing on sm_80, sm_90 and sm_100; `benchmarks/cubins.py` reads
that from the compiled kernels.

A kernel asks `tuned` for its tile. It gets one that was chosen by timing, where there is one for its device, dtype,
width and variant, and else the default; on a CPU always. `napkin autotune` times tiles and writes the choices as JSON
to the cache, for one device, version of Triton and of the kernels (`napkin.benchmarking.kernel_tuning`).
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from napkin.json_files import cache_path, cached_files, read_cached, write_cached

KIND = "triton-tiles"
MOST_CHOICES = 10_000
"""Choices of a file: more were never tuned."""
AttentionKernel = Literal["forward", "backward_keys", "backward_queries"]


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """The tile that one program of an attention kernel holds, and how it runs."""

    queries: int
    keys: int
    warps: int
    """Groups of 32 threads."""
    stages: int
    """Blocks of keys, or of queries, on their way from memory at a time."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """Tile of a program that holds a whole row."""

    warps: int


@dataclass(frozen=True, slots=True)
class BlockTile:
    """The tile of a program that holds some numbers of a row, or of a whole tensor."""

    block: int
    warps: int


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The tile of a program that computes a block of a product."""

    rows: int
    columns: int
    depth: int
    """Number of products that are summed at a time."""
    warps: int
    stages: int


Tile = AttentionTile | RowTile | BlockTile | ProductTile

TILES: dict[str, type[Tile]] = {
    "attention forward": AttentionTile,
    "attention backward_keys": AttentionTile,
    "attention backward_queries": AttentionTile,
    "norm": RowTile,
    "norm backward": RowTile,
    "rotation": RowTile,
    "swiglu": BlockTile,
    "swiglu backward": BlockTile,
    "gelu": BlockTile,
    "gelu backward": BlockTile,
    "adamw": BlockTile,
    "cross-entropy": BlockTile,
    "grouped product": ProductTile,
    "grouped outer product": ProductTile,
}
"""The kernels whose tiles can be tuned, and what a tile of each says."""
ELEMENTWISE = BlockTile(1024, 4)
"""Eight numbers for each of 128 threads."""
PRODUCT = ProductTile(64, 64, 32, 4, 3)
ROTATION = RowTile(4)
"""The tile of a program that rotates all heads of a position."""
MOST_NORM_PROGRAMS = 256
"""Programs of a norm's backward pass, each of which writes a row of partial sums: one to three per multiprocessor."""
_Tiles = dict[AttentionKernel, dict[int, AttentionTile]]
"""Tiles by kernel and widest head."""


def _tiles(*sizes: tuple[int, int, int, int]) -> dict[int, AttentionTile]:
    return {width: AttentionTile(*each) for width, each in zip((64, 128, 256), sizes, strict=True)}


HALF: _Tiles = {
    "forward": _tiles((128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
    "backward_keys": _tiles((64, 128, 8, 2), (32, 64, 8, 2), (16, 32, 4, 1)),
    "backward_queries": _tiles((128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
}
"""Tiles of attention in fp16 and bf16, causal or not."""

HALF_BOUNDED: _Tiles = {
    "forward": _tiles((64, 64, 4, 3), (64, 32, 4, 3), (64, 32, 8, 2)),
    "backward_keys": _tiles((32, 64, 8, 2), (32, 64, 8, 1), (16, 32, 4, 1)),
    "backward_queries": _tiles((128, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 1)),
}
"""Tiles of half-precision attention with documents, a window or a soft cap, which take registers."""

NARROW_ON_120: dict[tuple[AttentionKernel, bool], AttentionTile] = {
    ("forward", False): AttentionTile(128, 64, 8, 3),
    ("forward", True): AttentionTile(64, 64, 8, 3),
    ("backward_keys", False): AttentionTile(64, 64, 8, 2),
}
"""Tiles of half-precision attention with heads up to 64 on sm_120, by kernel and whether it is bounded, where those
above spill 16 to 72 bytes per thread."""
compiled_for: ContextVar[tuple[int, int] | None] = ContextVar("compiled_for", default=None)
"""The compute capability of a device that is not there, for which kernels are compiled ahead."""

FULL: _Tiles = {
    "forward": _tiles((64, 32, 8, 2), (32, 32, 8, 1), (16, 16, 8, 1)),
    "backward_keys": _tiles((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
    "backward_queries": _tiles((32, 16, 8, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
}
"""Tiles of attention in fp32."""

SomeTile = TypeVar("SomeTile", bound=Tile)
Name = Annotated[str, msgspec.Meta(max_length=256)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**32)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**14)]
Microseconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


@dataclass(frozen=True)
class Device:
    """The device that a choice of tiles holds for."""

    name: Name
    capability: Name
    """Compute capability, such as 9.0; for ROCm the architecture, such as gfx942."""
    triton: Name
    kernels: Name
    """The first digits of a SHA-256 of the kernels' source."""


@dataclass(frozen=True)
class Choice:
    """The fastest tile of a kernel for one dtype, width and variant."""

    kernel: Name
    dtype: Name
    width: Width
    """Numbers of a head, or of a row."""
    variant: Name
    tile: Annotated[dict[Name, Size], msgspec.Meta(max_length=8)]
    microseconds: Microseconds
    default_microseconds: Microseconds
    """Time of the default tile, which is used if nothing was tuned."""

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.kernel, self.dtype, self.width, self.variant


@dataclass(frozen=True)
class TunedTiles:
    """A file of choices of tiles for one device."""

    device: Device
    choices: Annotated[list[Choice], msgspec.Meta(max_length=MOST_CHOICES)]

    @property
    def is_valid(self) -> bool:
        """True if each tile has the fields of its kernel's, with powers of two."""
        return all(_fits(choice) for choice in self.choices)


@dataclass(frozen=True)
class Lookup:
    """The key that a launch looked up, and the tile that it got."""

    kernel: str
    default: Tile
    dtype: torch.dtype
    width: int
    variant: str


_forced: dict[str, dict[str, int]] = {}
_watching: list[list[Lookup]] = []


def tuned(kernel: str, default: SomeTile, tensor: Tensor, width: int, variant: str = "") -> SomeTile:
    """The tile of a launch on a tensor: one that is being tried, or was tuned for its device, or the default."""
    if _watching:
        _watching[-1].append(Lookup(kernel, default, tensor.dtype, width, variant))
    if kernel in _forced:
        return replace(default, **_forced[kernel])
    if not tensor.is_cuda:
        return default
    found = _choices_on(tensor.device.index).get((kernel, dtype_name(tensor.dtype), width, variant))
    return default if found is None else replace(default, **found)


def attention_tile(kernel: AttentionKernel, query: Tensor, *, bounded: bool, is_causal: bool) -> AttentionTile:
    """The tile for queries of that dtype and width; `bounded`: whether there are documents, a window or a soft cap."""
    variant = "bounded" if bounded else "causal" if is_causal else "all pairs"
    default = default_attention_tile(kernel, query, bounded=bounded)
    return tuned(f"attention {kernel}", default, query, query.shape[-1], variant)


def default_attention_tile(kernel: AttentionKernel, query: Tensor, *, bounded: bool) -> AttentionTile:
    """The tile for queries of that dtype and width; `bounded`: whether there are documents, a window or a soft cap."""
    table = FULL if query.dtype == torch.float32 else HALF_BOUNDED if bounded else HALF
    tile = next(tile for width, tile in table[kernel].items() if query.shape[-1] <= width)
    if query.dtype != torch.float32 and query.shape[-1] <= 64 and _capability(query) == (12, 0):
        tile = NARROW_ON_120.get((kernel, bounded), tile)
    # ROCm's devices have 64 KiB of shared memory: three stages of heads of 128 would take 80.
    return replace(tile, stages=min(tile.stages, 2)) if torch.version.hip is not None else tile


def _capability(tensor: Tensor) -> tuple[int, int] | None:
    if tensor.is_cuda and torch.version.hip is None:
        return torch.cuda.get_device_capability(tensor.device)
    return compiled_for.get()


def row_block(width: int) -> int:
    """Numbers of a program that holds a whole row: the next power of two."""
    return 1 << (width - 1).bit_length()


def row_tile(width: int) -> RowTile:
    """The tile of such a program: 8 numbers or more for each thread, 16 warps at most in flight."""
    return RowTile(min(16, max(1, row_block(width) // 512)))


def cross_entropy_tile(vocab_size: int) -> BlockTile:
    """The tile of a program that reads a row of logits in blocks."""
    return BlockTile(min(4096, row_block(vocab_size)), 8)


def dot_precision(dtype: torch.dtype) -> str:
    """The precision of products of fp32 matrices: like torch, tf32 only where it is allowed."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


@contextmanager
def forced(kernel: str, tile: Tile) -> Iterator[None]:
    """While it lasts, every launch of a kernel takes that tile."""
    before = dict(_forced)
    _forced[kernel] = asdict(tile)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@contextmanager
def watched_lookups() -> Iterator[list[Lookup]]:
    """The lookups of tiles that are made while it lasts."""
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def keep_choices(device: Device, choices: list[Choice]) -> Path:
    """Write choices to the file of a device, in addition to older ones of other keys; returns the file."""
    path = cache_path(KIND, device)
    kept = load_choices(device)
    merged = {choice.key: choice for choice in (*([] if kept is None else kept.choices), *choices)}
    write_cached(path, TunedTiles(device, list(merged.values())))
    _choices_on.cache_clear()
    return path


def load_choices(device: Device) -> TunedTiles | None:
    """The stored choices for a device; None if their file is missing or invalid."""
    found = _read(cache_path(KIND, device))
    return found if found is not None and found.device == device else None


def all_choices() -> list[TunedTiles]:
    """The stored choices of all devices."""
    return [found for path in cached_files(KIND) if (found := _read(path)) is not None]


def this_device(index: int | None = None) -> Device:
    """This machine's GPU, with the Triton and the kernels of this process."""
    properties = torch.cuda.get_device_properties(index)
    capability = getattr(properties, "gcnArchName", None) if torch.version.hip else None
    return Device(
        properties.name, capability or f"{properties.major}.{properties.minor}", triton_version(), kernels_version()
    )


def triton_version() -> str:
    for package in ("triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def kernels_version() -> str:
    """A digest of the kernels' sources, which changes whenever they do."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("triton_*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _choices_on(index: int | None) -> Mapping[tuple[str, str, int, str], dict[str, int]]:
    kept = load_choices(this_device(index))
    return {} if kept is None else {choice.key: choice.tile for choice in kept.choices}


def _read(path: Path) -> TunedTiles | None:
    found: Any = read_cached(path, TunedTiles)
    return found if found is not None and found.is_valid else None


def _fits(choice: Choice) -> bool:
    tile = TILES.get(choice.kernel)
    if tile is None or choice.tile.keys() != {field.name for field in fields(tile)}:
        return False
    return all(name == "stages" or size & (size - 1) == 0 for name, size in choice.tile.items())
