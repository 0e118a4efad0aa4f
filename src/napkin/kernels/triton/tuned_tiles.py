"""Tiles that were chosen by timing: kept as JSON in the cache, for one device, version of Triton and of the kernels.

A kernel asks `tuned` for its tile. It gets the default where nothing was tuned for its dtype, width and variant, and
always where there is no GPU. `napkin autotune` times and writes them (`napkin.benchmarking.kernel_tuning`).
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from napkin.json_files import cache_path, cached_files, read_cached, write_cached
from napkin.kernels.triton.tiles import TILES, AttentionKernel, AttentionTile, Tile, default_attention_tile

SomeTile = TypeVar("SomeTile", bound=Tile)
Name = Annotated[str, msgspec.Meta(max_length=256)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**32)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**14)]
Microseconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]

KIND = "triton-tiles"
MOST_CHOICES = 10_000
"""Of a file: more were never tuned."""


@dataclass(frozen=True)
class Device:
    """What a choice of tiles holds for."""

    name: Name
    capability: Name
    """As in 9.0; for ROCm the architecture, as in gfx942."""
    triton: Name
    kernels: Name
    """The first digits of a SHA-256 of the kernels' source."""


@dataclass(frozen=True)
class Choice:
    """The fastest tile of a kernel for one dtype, width and variant."""

    kernel: Name
    dtype: Name
    width: Width
    """Of a head, or of a row."""
    variant: Name
    tile: Annotated[dict[Name, Size], msgspec.Meta(max_length=8)]
    microseconds: Microseconds
    default_microseconds: Microseconds
    """Of the tile that is taken where nothing was tuned."""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What it is looked up by."""
        return self.kernel, self.dtype, self.width, self.variant


@dataclass(frozen=True)
class TunedTiles:
    """A file of choices."""

    device: Device
    choices: Annotated[list[Choice], msgspec.Meta(max_length=MOST_CHOICES)]

    @property
    def is_valid(self) -> bool:
        """Whether each tile has the fields of its kernel's, with powers of two."""
        return all(_fits(choice) for choice in self.choices)


@dataclass(frozen=True)
class Lookup:
    """What a launch asked for."""

    kernel: str
    default: Tile
    dtype: torch.dtype
    width: int
    variant: str


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


_forced: dict[str, dict[str, int]] = {}
_watching: list[list[Lookup]] = []


def keep_choices(device: Device, choices: list[Choice]) -> Path:
    """Write choices to the file of a device, beside older ones of other keys; returns the file."""
    path = cache_path(KIND, device)
    kept = load_choices(device)
    merged = {choice.key: choice for choice in (*([] if kept is None else kept.choices), *choices)}
    write_cached(path, TunedTiles(device, list(merged.values())))
    _choices_on.cache_clear()
    return path


def load_choices(device: Device) -> TunedTiles | None:
    """What is kept for a device; None if there is nothing, or nothing valid."""
    found = _read(cache_path(KIND, device))
    return found if found is not None and found.device == device else None


def all_choices() -> list[TunedTiles]:
    """What is kept for any device."""
    return [found for path in cached_files(KIND) if (found := _read(path)) is not None]


def this_device(index: int | None = None) -> Device:
    """This machine's GPU, with the Triton and the kernels of this process."""
    properties = torch.cuda.get_device_properties(index)
    capability = getattr(properties, "gcnArchName", None) if torch.version.hip else None
    return Device(
        properties.name, capability or f"{properties.major}.{properties.minor}", triton_version(), kernels_version()
    )


def triton_version() -> str:
    """Of the package that is installed."""
    for package in ("triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def kernels_version() -> str:
    """It changes with every change of the kernels."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def dtype_name(dtype: torch.dtype) -> str:
    """As in bfloat16."""
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
