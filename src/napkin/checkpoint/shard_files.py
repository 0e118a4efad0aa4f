"""Files of tensors of which each holds parts: `model-00001-of-00004.safetensors` and its like.

A part is a box of the whole tensor. Its offsets are in the file's header, in the format of
torch.distributed.checkpoint's safetensors storage, so that its HuggingFaceStorageReader reads these files too. That
format has one box per tensor and file: a rank that has several of a tensor writes several files. Any number of ranks
can read any boxes.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from napkin.checkpoint.parts import Box, Part, Parts, first_fault
from napkin.files import refuse_irregular

STEMS = ("model", "optimizer")
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_NAME = re.compile(r"(\w+)-00001-of-(\d{5,})\.safetensors")


class ShardError(Exception):
    """A file that does not hold the expected tensors, and what is wrong with it."""

    def __init__(self, path: Path, how: str) -> None:
        super().__init__(how)
        self.path = path
        self.how = how


def shard_name(stem: str, number: int, total: int) -> str:
    """The name of one of several files, counted from 0."""
    return f"{stem}-{number + 1:05d}-of-{total:05d}.safetensors"


def tensor_files(stem: str, names: Iterable[str]) -> list[str]:
    """The files that hold the tensors of a stem: one, or all those that the name of the first one says there are."""
    for name in names:
        if (match := _NAME.fullmatch(name)) and match[1] == stem:
            return [shard_name(stem, number, int(match[2])) for number in range(int(match[2]))]
    return [f"{stem}.safetensors"]


def write_parts(path: Path, tensors: Parts) -> None:
    """Write a file with one part of each tensor. Without an offset in its header, all tensors in it are whole."""
    parts = {name: part for name, (part,) in tensors.items()}
    offsets = {name: {_OFFSETS: part.offsets} for name, part in parts.items()}
    # A single entry: the library writes several in random order, and the bytes of the file would differ.
    metadata = None if path.stem in STEMS else {_INFO: json.dumps(offsets)}
    save_file({name: part.tensor.contiguous() for name, part in parts.items()}, path, metadata=metadata)


def copy_parts_into(
    targets: Parts, paths: list[Path], *, stored_as: Mapping[str, torch.dtype] | None = None, among_others: bool = False
) -> None:
    """Copy what the files hold of each target into it.

    Raises ShardError where files and targets differ in a name, a shape or a format, or where the parts of a tensor in
    the files overlap or do not make up the whole; `stored_as` are the files' formats by name where they are not the
    targets', and with `among_others` they may hold more tensors.
    """
    with contextlib.ExitStack() as stack:
        stored = {name: _Stored.of(name, boxes, paths[0]) for name, boxes in _open(paths, stack).items()}
        for name in sorted(targets.keys() if among_others else targets.keys() | stored.keys()):
            found = str(stored.get(name, "missing"))
            expected = describe(targets.get(name), (stored_as or {}).get(name))
            # A rank may have no part of a tensor, and then does not know its format.
            if found != expected and targets.get(name) != []:
                raise ShardError(
                    paths[0], f"does not fit its recipe: tensor '{name}' is {found}, the model's is {expected}"
                )
        with torch.no_grad():
            for name, parts in targets.items():
                for part in parts:
                    stored[name].copy_into(part)


@dataclass(frozen=True)
class _StoredBox:
    box: Box
    values: Any
    """A lazy slice of a safetensors file: indexing it reads from the disk."""
    format: str


@dataclass(frozen=True)
class _Stored:
    """A tensor in boxes that make up the whole."""

    boxes: list[_StoredBox]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, boxes: list[_StoredBox], path: Path) -> "_Stored":
        if len({(each.format, len(each.box.sizes)) for each in boxes}) > 1:
            raise ShardError(path, f"holds tensor '{name}' in parts of different formats or numbers of dimensions")
        shape = tuple(map(max, zip(*(each.box.ends for each in boxes), strict=True)))
        fault = first_fault([each.box for each in boxes], shape)
        if fault is not None:
            raise ShardError(path, f"holds tensor '{name}' in parts that overlap or leave a gap, at index {fault}")
        return cls(boxes, shape)

    def copy_into(self, part: Part) -> None:
        for each in self.boxes:
            place = part.box.within(each.box)
            if place is not None:
                here = each.box.within(part.box)
                part.tensor[place].copy_(each.values[here])

    def __str__(self) -> str:
        return f"{_FORMATS.get(self.boxes[0].format, self.boxes[0].format)} {self.shape}"


def _open(paths: list[Path], stack: contextlib.ExitStack) -> dict[str, list[_StoredBox]]:
    """The boxes of each tensor in all files."""
    boxes: dict[str, list[_StoredBox]] = {}
    for path in paths:
        try:
            refuse_irregular(path)
            file = stack.enter_context(safe_open(path, framework="pt"))
            info = (file.metadata() or {}).get(_INFO)
            offsets = {} if info is None else json.loads(info)
            names = list(file.keys())
            if info is not None and offsets.keys() != set(names):
                raise ValueError("of other tensors than the file holds")
            for name in names:
                values = file.get_slice(name)
                sizes = tuple(values.get_shape())
                place = [0] * len(sizes) if info is None else offsets[name][_OFFSETS]
                box = Box(_checked(place, len(sizes)), sizes)
                boxes.setdefault(name, []).append(_StoredBox(box, values, values.get_dtype()))
        except (OSError, SafetensorError) as error:
            raise ShardError(path, f"cannot be read as safetensors ({error})") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ShardError(path, f"has no valid offsets in its header ({error!r})") from None
    return boxes


def _checked(offsets: Any, dimensions: int) -> tuple[int, ...]:
    if not isinstance(offsets, list) or len(offsets) != dimensions:
        raise ValueError(f"not a list of {dimensions}")
    if not all(type(offset) is int and 0 <= offset < 2**63 for offset in offsets):
        raise ValueError("not numbers from 0 on")
    return tuple(offsets)


def describe(parts: list[Part] | None, stored_as: torch.dtype | None = None) -> str:
    """Format and shape of a whole tensor; `stored_as` replaces the format."""
    if parts is None:
        return "missing"
    if not parts:
        return "not on this rank"
    return describe_tensor(parts[0].tensor.dtype if stored_as is None else stored_as, parts[0].shape)


def describe_tensor(format: torch.dtype, shape: Iterable[int]) -> str:
    """A format and a shape."""
    return f"{str(format).removeprefix('torch.')} {tuple(shape)}"


_FORMATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
