"""Files that each hold parts of tensors, such as `model-00001-of-00004.safetensors`, and SHA256SUMS, the checksums of
all files of a checkpoint in the format that `sha256sum -c` reads.

A part is a box of the whole tensor. Its offsets are in the file's header, in the format of
torch.distributed.checkpoint's safetensors storage, so that its HuggingFaceStorageReader reads these files too. That
format has one box per tensor and file: a rank that has several of a tensor writes several files. Any number of ranks
can read any boxes.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from napkin.errors import CorruptFile
from napkin.files import atomic_write_bytes, atomic_write_text, read_bytes, refuse_irregular, regular, sync_file
from napkin.optim.tensor_parts import Box, Parts


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


STEMS = ("model", "optimizer")
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_NAME = re.compile(r"(\w+)-00001-of-(\d{5,})\.safetensors")
_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def shard_name(stem: str, number: int, total: int) -> str:
    return f"{stem}-{number + 1:05d}-of-{total:05d}.safetensors"


def tensor_files(stem: str, names: Iterable[str]) -> list[str]:
    """The files that hold the tensors of a stem: one, or all those that the name of the first one says there are."""
    for name in names:
        if (match := _NAME.fullmatch(name)) and match[1] == stem:
            return [shard_name(stem, number, int(match[2])) for number in range(int(match[2]))]
    return [f"{stem}.safetensors"]


def write_tensors(path: Path, tensors: Parts) -> str:
    """Write a file with one part of each tensor to the disk; its folder exists. Returns its checksum.

    Without an offset in its header, all tensors in it are whole.
    """
    parts = {name: part for name, (part,) in tensors.items()}
    offsets = {name: {_OFFSETS: part.offsets} for name, part in parts.items()}
    # A single entry: the library writes several in random order, and the bytes of the file would differ.
    metadata = None if path.stem in STEMS else {_INFO: json.dumps(offsets)}
    save_file({name: part.tensor.contiguous() for name, part in parts.items()}, path, metadata=metadata)
    # safetensors creates files that only their owner can read; a run's other files follow the user's umask.
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync_file(path)
    return checksum_of(path)


def copy_files_into(
    targets: Parts, paths: list[Path], *, stored_as: Mapping[str, torch.dtype] | None = None, among_others: bool = False
) -> None:
    """Copy the tensors that files hold together, whole or in parts, into `targets`; with `among_others` they may hold
    more.

    Raises CorruptFile where files and targets differ in a name, a shape or a format, or where the parts of a tensor in
    the files overlap or do not make up the whole; `stored_as` are the files' formats by name where they are not the
    targets'.
    """
    with contextlib.ExitStack() as stack, torch.no_grad():
        stored = _open(paths, stack)
        names = targets.keys() if among_others else targets.keys() | stored.keys()
        _refuse_differences(sorted(names), targets, stored, stored_as or {}, paths[0])
        for name, parts in targets.items():
            for part, each in itertools.product(parts, stored.get(name, ())):
                place = part.box.within(each.box)
                if place is not None:
                    is_whole = part.box == each.box
                    values = each.file.get_tensor(name) if is_whole else each.values[each.box.within(part.box)]
                    part.tensor[place].copy_(values)


def _refuse_differences(
    names: Sequence[str],
    targets: Parts,
    stored: Mapping[str, "Sequence[_StoredBox]"],
    stored_as: Mapping[str, torch.dtype],
    first: Path,
) -> None:
    """Raise CorruptFile for a tensor that the files have in another shape or format than the targets, or one of the
    two lacks."""
    shapes = {name: _shape_of(name, boxes, first) for name, boxes in stored.items()}
    for name in names:
        boxes, parts = stored.get(name), targets.get(name)
        if parts == []:
            # A rank that has no part of a tensor does not know its format.
            continue
        actual = "missing" if boxes is None else f"{_format_name(boxes[0].format)} {shapes[name]}"
        expected = "missing"
        if parts is not None:
            expected = f"{_format_name(stored_as.get(name, parts[0].tensor.dtype))} {parts[0].shape}"
        if actual != expected:
            raise damaged(
                first if boxes is None else boxes[0].path,
                f"does not fit its recipe: tensor '{name}' is {actual}, the model's is {expected}",
            )


class _StoredBox(NamedTuple):
    """A box of a tensor in a file."""

    box: Box
    file: Any
    values: Any
    """A lazy slice: indexing it reads from the disk."""
    path: Path

    @property
    def format(self) -> str:
        return self.values.get_dtype()


def _shape_of(name: str, boxes: Sequence[_StoredBox], path: Path) -> tuple[int, ...]:
    """The shape of a tensor whose boxes make up the whole."""
    if len({(each.format, len(each.box.sizes)) for each in boxes}) > 1:
        raise damaged(path, f"holds tensor '{name}' in parts of different formats or numbers of dimensions")
    shape = tuple(map(max, zip(*(each.box.ends for each in boxes), strict=True)))
    fault = first_fault([each.box for each in boxes], shape)
    if fault is not None:
        raise damaged(path, f"holds tensor '{name}' in parts that overlap or leave a gap, at index {fault}")
    return shape


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
                if not isinstance(place, list) or len(place) != len(sizes):
                    raise ValueError(f"not a list of {len(sizes)}")
                if not all(type(offset) is int and 0 <= offset < 2**63 for offset in place):
                    raise ValueError("not numbers from 0 on")
                boxes.setdefault(name, []).append(_StoredBox(Box(tuple(place), sizes), file, values, path))
        except (OSError, SafetensorError) as error:
            raise damaged(path, f"cannot be read as safetensors ({error})") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(path, f"has no valid offsets in its header ({error!r})") from None
    return boxes


def _format_name(format: torch.dtype | str) -> str:
    return str(_FORMATS.get(format, format) if isinstance(format, str) else format).removeprefix("torch.")


SUMS = "SHA256SUMS"
FROZEN = "../frozen/model.safetensors"
"""The weights that a run does not train, as a checkpoint that needs them lists them; see `state.py`."""


def write_state(draft: Path, state: bytes, sums: dict[str, str], *, frozen: str | None = None) -> None:
    """Complete a checkpoint: add state.json and SHA256SUMS to tensor files whose checksums are `sums`; `frozen` is that
    of the run's frozen weights, if it has any."""
    atomic_write_bytes(draft / "state.json", state)
    sums = {**sums, "state.json": checksum_of(draft / "state.json")}
    write_sums(draft, sums if frozen is None else {**sums, FROZEN: frozen})


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    atomic_write_text(folder / SUMS, _format_sums(sums))


def read_sums(folder: Path) -> dict[str, str]:
    """Read the checksums of all files of a checkpoint, by file name; of one that needs frozen weights those too.

    Raises CorruptFile.
    """
    sums, text = parse_sums(folder)
    expected = [*(name for stem in STEMS for name in tensor_files(stem, sums)), "state.json"]
    if sums.keys() - {FROZEN} != set(expected) or text != _format_sums(sums):
        raise damaged(folder / SUMS, f"does not list {', '.join(expected)}")
    return sums


def parse_sums(folder: Path) -> tuple[dict[str, str], str]:
    """The checksums in a folder, by file name, whatever it lists; and the text. Raises CorruptFile."""
    path = folder / SUMS
    try:
        text = read_bytes(path).decode("ascii")
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise damaged(path, "is not text") from None
    return {name: checksum for checksum, _, name in (line.partition("  ") for line in text.splitlines())}, text


def _format_sums(sums: dict[str, str]) -> str:
    return "".join(f"{checksum}  {name}\n" for name, checksum in sums.items())


def frozen_path(checkpoints: Path) -> Path:
    return checkpoints / Path(FROZEN).parent.name / Path(FROZEN).name


def checksum_of(path: Path) -> str:
    checksum = sha256()
    with open(path, "rb", opener=regular) as file:
        while chunk := file.read(2**20):
            checksum.update(chunk)
    return checksum.hexdigest()


def readable_checksum(path: Path) -> str:
    """SHA-256 of a file of a checkpoint. Raises CorruptFile where it cannot be read."""
    try:
        return checksum_of(path)
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from None


def damaged(path: Path, how: str) -> CorruptFile:
    if path.parent.name == Path(FROZEN).parent.name:
        return CorruptFile(f"'{path}' {how}: restore the file, all checkpoints of the run need it")
    return CorruptFile(f"'{path}' {how}: restore the file, or remove its folder to continue from an earlier step")


# Torch parallelises reductions of more elements.
_SERIAL_NUMEL = 2**15


def is_finite(tensor: Tensor) -> bool:
    """True if every element is finite; on a CPU computed by a single thread, as the others may be training."""
    pieces = tensor.detach().flatten().split(_SERIAL_NUMEL) if tensor.device.type == "cpu" else [tensor]
    return all(math.isfinite(each.item()) for piece in pieces if piece.numel() for each in torch.aminmax(piece))


def stored_bytes(paths: Iterable[Path]) -> int:
    """Bytes of the tensors in files: all of these, except the names at their beginning."""
    total = 0
    for path in paths:
        with open(path, "rb", opener=regular) as file:
            # The format begins with the length of its header.
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def formats_of(path: Path) -> dict[str, torch.dtype]:
    """The formats of the tensors of a file, by name, of those that are formats of weights. Raises CorruptFile."""
    try:
        refuse_irregular(path)
        with safe_open(path, framework="pt") as file:
            formats = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise damaged(path, f"cannot be read as safetensors ({error})") from None
    return {name: _FORMATS[each] for name, each in formats.items() if each in _FORMATS}
