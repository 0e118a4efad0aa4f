"""Files that each hold parts of tensors, such as `model-00001-of-00004.safetensors`, and SHA256SUMS, the checksums of
all files of a checkpoint in the format that `sha256sum -c` reads.

A part is a box of the whole tensor. Its offsets are in the file's header, in the format of
torch.distributed.checkpoint's safetensors storage, so that its HuggingFaceStorageReader reads these files too. That
format has one box per tensor and file: a rank that has several of a tensor writes several files. Any number of ranks
can read any boxes.

A box is an offset and a length in every dimension. A rank of FSDP2 has one box of each tensor, some of its rows.
Matrices that are stacked in one parameter are divided matrix by matrix among tensor-parallel ranks, which then have a
box of each.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from napkin.errors import CorruptFile
from napkin.files import atomic_write_bytes, atomic_write_text, read_bytes, refuse_irregular, regular, sync_file
from napkin.optim.saved_state import Ranges, indices_of, joined, local


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
        """The box that the part is."""
        return Box(self.offsets, tuple(self.tensor.shape))


Parts = dict[str, list[Part]]
"""The parts of tensors that a rank has, by name."""


def is_whole(parts: Sequence[Part]) -> bool:
    """True for a single part that is the whole tensor."""
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
    """Each range with its beginning in the rank's own tensor."""
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


SUMS = "SHA256SUMS"
FROZEN = "../frozen/model.safetensors"
"""The weights that a run does not train, as a checkpoint that needs them lists them; see `state.py`."""
TENSOR_FILES = tuple(f"{stem}.safetensors" for stem in STEMS)
"""The tensor files of a checkpoint that is not sharded."""


def write_state(draft: Path, state: bytes, sums: dict[str, str], *, frozen: str | None = None) -> None:
    """Complete a checkpoint: add state.json and SHA256SUMS to tensor files whose checksums are `sums`; `frozen` is that
    of the run's frozen weights, if it has any."""
    atomic_write_bytes(draft / "state.json", state)
    sums = {**sums, "state.json": checksum_of(draft / "state.json")}
    write_sums(draft, sums if frozen is None else {**sums, FROZEN: frozen})


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    """Write the checksums of files, by name, into a folder."""
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
    """The file of the frozen weights of a folder of checkpoints."""
    return checkpoints / Path(FROZEN).parent.name / Path(FROZEN).name


def checksum_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    checksum = sha256()
    with open(path, "rb", opener=regular) as file:
        while chunk := file.read(2**20):
            checksum.update(chunk)
    return checksum.hexdigest()


def damaged(path: Path, how: str) -> CorruptFile:
    """The error that names a file of a checkpoint and what is wrong with it."""
    if path.parent.name == Path(FROZEN).parent.name:
        return CorruptFile(f"'{path}' {how}: restore the file, all checkpoints of the run need it")
    return CorruptFile(f"'{path}' {how}: restore the file, or remove its folder to continue from an earlier step")


# The tensors in files of a checkpoint: written to the disk, and copied out of them when they are those expected.

_STORED_TENSORS_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Torch parallelises reductions of more elements.
_SERIAL_NUMEL = 2**15


def write_tensors(path: Path, tensors: Parts) -> str:
    """Write a file of tensors, or of parts of them, to the disk; its folder exists. Returns its checksum."""
    write_parts(path, tensors)
    # safetensors creates files that only their owner can read; a run's other files follow the user's umask.
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync_file(path)
    return checksum_of(path)


def is_finite(tensor: Tensor) -> bool:
    """True if every element is finite; on a CPU computed by a single thread, as the others may be training."""
    pieces = tensor.detach().flatten().split(_SERIAL_NUMEL) if tensor.device.type == "cpu" else [tensor]
    return all(math.isfinite(each.item()) for piece in pieces if piece.numel() for each in torch.aminmax(piece))


def copy_files_into(
    targets: Parts,
    paths: list[Path],
    *,
    stored_as: Mapping[str, torch.dtype] | None = None,
    among_others: bool = False,
) -> None:
    """Copy the tensors that files hold together into `targets`; with `among_others` they may hold more.

    Raises CorruptFile where a name, a shape or a format differs; `stored_as` are the formats in the files by name where
    they are not the targets'.
    """
    if any(path.stem not in STEMS for path in paths) or not all(map(is_whole, targets.values())):
        try:
            return copy_parts_into(targets, paths, stored_as=stored_as, among_others=among_others)
        except ShardError as error:
            raise damaged(error.path, error.how) from None
    stored, place = {}, {}
    for path in paths:
        try:
            refuse_irregular(path)
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise damaged(path, f"cannot be read as safetensors ({error})") from None
        stored |= found
        place |= dict.fromkeys(found, path)
    for name in sorted(targets.keys() if among_others else targets.keys() | stored.keys()):
        found = describe_tensor(stored[name].dtype, stored[name].shape) if name in stored else "missing"
        expected = describe(targets.get(name), (stored_as or {}).get(name))
        if found != expected:
            raise damaged(
                place.get(name, paths[0]),
                f"does not fit its recipe: tensor '{name}' is {found}, the model's is {expected}",
            )
    with torch.no_grad():
        for name, (target,) in targets.items():
            target.tensor.copy_(stored[name])


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
    return {name: _STORED_TENSORS_FORMATS[each] for name, each in formats.items() if each in _STORED_TENSORS_FORMATS}
