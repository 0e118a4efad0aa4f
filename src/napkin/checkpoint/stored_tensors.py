"""The tensors in files of a checkpoint: written to the disk, and copied out of them when they are those expected."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from napkin.checkpoint.shard_files import (
    STEMS,
    Parts,
    ShardError,
    checksum_of,
    copy_parts_into,
    damaged,
    describe,
    describe_tensor,
    is_whole,
    write_parts,
)
from napkin.files import refuse_irregular, regular, sync_file

_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
    return {name: _FORMATS[each] for name, each in formats.items() if each in _FORMATS}
