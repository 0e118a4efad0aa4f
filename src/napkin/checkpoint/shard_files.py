"""Files of tensors that are sharded by rows: `model-00001-of-00004.safetensors` holds the rows of rank 0.

The first row of each tensor is in the file's header, in the format of torch.distributed.checkpoint's safetensors
storage, so that its HuggingFaceStorageReader reads these files too. Any number of ranks can read any rows.
"""

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from napkin.files import refuse_irregular
from napkin.optim.sharded_tensors import is_sharded, local, rows_of

STEMS = ("model", "optimizer")
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_NAME = re.compile(r"model-00001-of-(\d{5})\.safetensors")


class ShardError(Exception):
    """A file that does not hold the expected tensors, and what is wrong with it."""

    def __init__(self, path: Path, how: str) -> None:
        super().__init__(how)
        self.path = path
        self.how = how


def shard_name(stem: str, rank: int, size: int) -> str:
    """The name of a rank's file, ranks counted from 0."""
    return f"{stem}-{rank + 1:05d}-of-{size:05d}.safetensors"


def shard_names(names: Iterable[str]) -> list[str]:
    """All tensor files of a sharded checkpoint, given names that include the first shard; empty if it is not
    sharded."""
    for name in names:
        if match := _NAME.fullmatch(name):
            size = int(match[1])
            return [shard_name(stem, rank, size) for stem in STEMS for rank in range(size)]
    return []


def write_rows(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write this rank's rows of sharded tensors."""
    here = {name: local(tensor).contiguous() for name, tensor in tensors.items()}
    offsets = {name: {_OFFSETS: [rows_of(tensors[name])[0], *[0] * (here[name].ndim - 1)]} for name in here}
    # A single entry: the library writes several in random order, and the bytes of the file would differ.
    save_file(here, path, metadata={_INFO: json.dumps(offsets)})


def is_by_rows(targets: dict[str, Tensor], path: Path) -> bool:
    """Whether the targets or the file are sharded, so that rows have to be looked up."""
    return not path.exists() or any(map(is_sharded, targets.values()))


def copy_rows_into(
    targets: dict[str, Tensor], path: Path, *, stored_as: torch.dtype | None = None, among_others: bool = False
) -> None:
    """Copy this rank's rows into each target, from one file or from all shards with its stem.

    Raises ShardError where files and targets differ in a name, a shape or a format, or where rows are missing;
    `stored_as` is the files' format if it is not the targets', and with `among_others` they may hold more tensors.
    """
    with contextlib.ExitStack() as stack:
        stored = _open([path] if path.exists() else sorted(path.parent.glob(f"{path.stem}-*-of-*.safetensors")), stack)
        for name in sorted(targets.keys() if among_others else targets.keys() | stored.keys()):
            found, expected = _describe_stored(stored.get(name)), describe(targets.get(name), stored_as)
            if found != expected:
                raise ShardError(
                    path, f"does not fit its recipe: tensor '{name}' is {found}, the model's is {expected}"
                )
        with torch.no_grad():
            for name, target in targets.items():
                _copy(stored[name], target)


@dataclass(frozen=True)
class _Piece:
    rows: Any
    """A lazy slice of a safetensors file: indexing it reads from the disk."""
    start: int
    stop: int
    rest: tuple[int, ...]
    format: str


def _open(paths: list[Path], stack: contextlib.ExitStack) -> dict[str, list[_Piece]]:
    pieces: dict[str, list[_Piece]] = {}
    for path in paths:
        try:
            refuse_irregular(path)
            file = stack.enter_context(safe_open(path, framework="pt"))
            offsets = json.loads((file.metadata() or {}).get(_INFO, "{}"))
            for name in file.keys():  # noqa: SIM118
                rows = file.get_slice(name)
                n_rows, *rest = rows.get_shape()
                start = int(offsets[name][_OFFSETS][0]) if offsets else 0
                pieces.setdefault(name, []).append(_Piece(rows, start, start + n_rows, tuple(rest), rows.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise ShardError(path, f"cannot be read as safetensors ({error})") from None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ShardError(path, f"has no valid row offsets in its header ({error!r})") from None
    for each in pieces.values():
        each.sort(key=lambda piece: piece.start)
    return pieces


def _copy(pieces: list[_Piece], target: Tensor) -> None:
    start, stop = rows_of(target)
    here = local(target)
    for piece in pieces:
        first, last = max(start, piece.start), min(stop, piece.stop)
        if first < last:
            here[first - start : last - start].copy_(piece.rows[first - piece.start : last - piece.start])


def _describe_stored(pieces: list[_Piece] | None) -> str:
    """Format and shape of the tensor that the pieces form, or what is wrong with them."""
    if not pieces:
        return "missing"
    end = 0
    for piece in pieces:
        if piece.start != end or (piece.rest, piece.format) != (pieces[0].rest, pieces[0].format):
            return f"in shards that are not contiguous, at row {end}"
        end = piece.stop
    return f"{_FORMATS.get(pieces[0].format, pieces[0].format)} {(end, *pieces[0].rest)}"


def describe(tensor: Tensor | None, stored_as: torch.dtype | None = None) -> str:
    """Format and shape of a tensor; `stored_as` replaces the format."""
    if tensor is None:
        return "missing"
    return f"{str(stored_as or tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


_FORMATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
