"""The weights that a run does not train, kept once beside its checkpoints: `frozen/` holds model.safetensors, with the
tensors as the run holds them, and SHA256SUMS.

It is written with the run's folder and never changed. A checkpoint of such a run holds what is trained, and lists the
checksum of the frozen weights that it goes with: a run needs nothing but its own folder.
"""

import os
from pathlib import Path

from safetensors import SafetensorError

from napkin.checkpoint.checksums import SUMS, checksum_of, damaged, frozen_path, parse_sums, write_sums
from napkin.checkpoint.state import frozen_tensors, model_tensors, whole
from napkin.checkpoint.stored_tensors import copy_files_into, formats_of, is_finite, write_tensors
from napkin.errors import NapkinError
from napkin.files import draft_folder, sync_folder
from napkin.model.transformer import Transformer


def write_frozen(checkpoints: Path, model: Transformer) -> str:
    """Write the weights of a model that are not trained, whole or not at all. Returns their checksum.

    Raises NapkinError where a number is infinite or NaN, and where the disk is full or cannot be written.
    """
    path, named = frozen_path(checkpoints), frozen_tensors(model)
    for name, tensor in named.items():
        if not is_finite(tensor):
            raise NapkinError(f"tensor '{name}' of the start holds infinity or NaN: start from another model")
    try:
        with draft_folder(path.parent) as draft:
            checksum = write_tensors(draft / path.name, whole(named))
            write_sums(draft, {path.name: checksum})
            draft.rename(path.parent)
            sync_folder(checkpoints)
    except (OSError, SafetensorError) as error:
        raise NapkinError(
            f"the frozen weights cannot be written ({error}): free some space, or choose a --run on another disk"
        ) from None
    return checksum


def load_frozen(checkpoints: Path, model: Transformer) -> None:
    """Copy frozen weights, verified by their checksum, into a model that has nothing else. Raises CorruptFile."""
    path, expected = frozen_path(checkpoints), frozen_checksum(checkpoints)
    try:
        found = checksum_of(path)
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from None
    if found != expected:
        raise damaged(path, f"was truncated or changed, its SHA-256 is not the one in {SUMS}")
    copy_files_into(whole(model_tensors(model)), [path], stored_as=formats_of(path))


def frozen_checksum(checkpoints: Path) -> str:
    """The checksum of frozen weights as they were written. Raises CorruptFile."""
    path = frozen_path(checkpoints)
    return parse_sums(path.parent)[0].get(path.name, "")


def has_frozen(checkpoints: Path) -> bool:
    """Whether a folder of checkpoints has frozen weights beside them."""
    return os.path.lexists(frozen_path(checkpoints).parent)


def keep_frozen(checkpoints: Path, model: Transformer) -> str | None:
    """The checksum of a model's frozen weights, which are written if they are not there; None where it has none."""
    if not frozen_tensors(model):
        return None
    return frozen_checksum(checkpoints) if has_frozen(checkpoints) else write_frozen(checkpoints, model)
