"""The folder of checkpoints: their names, their verification, and which of them are kept.

`step-00000200/` holds model.safetensors, optimizer.safetensors, state.json, and SHA256SUMS over the three, in the
format that `sha256sum -c` reads. Where ranks divide the model or its optimizer state, each writes files of its own in
place of the first two (`shard_files.py`). Where adapters are trained, model.safetensors holds what is trained, and all
else is kept once (`state.py`). Nothing in it is executable: tensors are safetensors, the rest is text.

Functions at the end check the disk's space, for the next checkpoint and for all that a run will keep.
"""

import contextlib
import re
import secrets
import shutil
from pathlib import Path

import msgspec

from napkin.accounting.ledger import Ledger
from napkin.checkpoint.shard_files import FROZEN, SUMS, damaged, frozen_path, read_sums, readable_checksum
from napkin.checkpoint.state import Checkpoint, State
from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import free_disk_bytes, read_bytes, sync_folder
from napkin.recipe.training_config import TrainingConfig
from napkin.runs.run_folder import DRAFT
from napkin.units import format_bytes

_NAME = re.compile(r"step-(\d{8,})")


def prune_checkpoints(folder: Path, *, keep: int, best: int | None = None) -> None:
    """Remove all but the `keep` newest checkpoints and that of step `best`, and the temporary folders of killed
    writers."""
    for path in checkpoint_paths(folder)[keep:]:
        if best is not None and path == checkpoint_path(folder, best):
            continue
        # Renamed first: a kill during removal leaves no checkpoint with missing files.
        path.rename(path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp"))
    for path in folder.iterdir():
        if DRAFT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither read nor removed. Returns its new path."""
    names = (path.with_name(f"damaged-{path.name}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    sync_folder(path.parent)
    return aside


def checkpoint_paths(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, newest first; other files beside them are ignored."""
    numbered = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def _goes_with_others(frozen: str, path: Path) -> bool:
    """True if another checkpoint beside `path` lists frozen weights of that checksum."""
    for other in checkpoint_paths(path.parent):
        with contextlib.suppress(CorruptFile):
            if other != path and read_sums(other).get(FROZEN) == frozen:
                return True
    return False


def read_checkpoint(path: Path, *, verify: bool = True, verify_frozen: bool = True) -> Checkpoint:
    """Read a checkpoint and verify the checksums of its files; without `verify`, another rank has done that, and
    without `verify_frozen` the frozen weights are left out.

    Raises CorruptFile naming the file and what is wrong with it.
    """
    expected = read_sums(path)
    for name in expected if verify else ():
        if name == FROZEN and not verify_frozen:
            continue
        file, listed = path / name, SUMS
        if name == FROZEN:
            file, listed = frozen_path(path.parent), f"{path.name}/{SUMS}"
        checksum = readable_checksum(file)
        if name == FROZEN and checksum != expected[name] and _goes_with_others(checksum, path):
            raise damaged(path / SUMS, "lists frozen weights of another run than the checkpoints beside it")
        if checksum != expected[name]:
            raise damaged(file, f"was truncated or changed, its SHA-256 is not the one in {listed}")
    try:
        state = msgspec.json.decode(read_bytes(path / "state.json"), type=State)
        state.history.refuse_impossible(state.step)
    except (OSError, ValueError) as error:
        how = first_line(error)
        raise damaged(path / "state.json", f"does not describe a checkpoint of this version ({how})") from None
    except RecursionError:
        raise damaged(path / "state.json", "is nested too deeply to describe a checkpoint") from None
    if path != checkpoint_path(path.parent, state.step):
        raise damaged(path / "state.json", f"is that of another checkpoint, of step {state.step}")
    return Checkpoint(path, state, expected.get(FROZEN))


# Tensor names, checksums, and rounding up to whole blocks of the file system.
_OVERHEAD_BYTES = 2**17


def checkpoint_bytes(ledger: Ledger) -> int:
    """Bytes of a device's checkpoint by count: parameters that are trained, and optimizer state."""
    return ledger.trained_bytes + ledger.peak_by_category.get("optimizer state", 0)


def kept_checkpoints(training: TrainingConfig) -> int:
    """The largest number of checkpoints that a run keeps: the newest and the best."""
    return training.keep_checkpoints + training.keep_best


def refuse_full_disk(folder: Path, size_bytes: int) -> None:
    """Raise NapkinError where the disk has no space for a checkpoint. Quotas are only noticed when it is written."""
    needed, free = size_bytes + _OVERHEAD_BYTES, free_disk_bytes(folder)
    if free < needed:
        raise NapkinError(
            f"the next checkpoint takes {format_bytes(needed)}, the disk of '{folder}' has {format_bytes(free)} free: "
            f"make room and continue with `napkin resume {folder.parent}`, earlier checkpoints are kept"
        )


def refuse_too_small_disk(run: Path, size_bytes: int, frozen_bytes: int = 0) -> None:
    """Raise NapkinError where the disk has no space for the frozen weights and a single checkpoint of a run that has no
    folder yet."""
    needed, free = size_bytes + frozen_bytes + _OVERHEAD_BYTES, free_disk_bytes(run)
    if free < needed:
        what = "the frozen weights and a checkpoint take" if frozen_bytes else "a checkpoint takes"
        raise NapkinError(
            f"{what} {format_bytes(needed)}, the disk of '{run}' has {format_bytes(free)} free: "
            "free some space, or choose a --run on another disk"
        )


def disk_warning(folder: Path, size_bytes: int, training: TrainingConfig) -> str | None:
    """A warning where the disk has space for the next checkpoint, but not for all that the run will keep."""
    kept = kept_checkpoints(training)
    # One more is written before the oldest is removed.
    missing = kept + 1 - len(checkpoint_paths(folder))
    needed, free = missing * (size_bytes + _OVERHEAD_BYTES), free_disk_bytes(folder)
    if missing <= 0 or free >= needed:
        return None
    return (
        f"the run will keep up to {kept} checkpoints of {format_bytes(size_bytes)} and writes one more beside them, "
        f"the disk of '{folder}' has {format_bytes(free)} free: make room for {format_bytes(needed - free)} "
        "more before they are written, or lower --training.keep-checkpoints"
    )
