"""Disk space for checkpoints: for the next one, and for all that a run will keep."""

import shutil
from pathlib import Path

from napkin.accounting.ledger import Ledger
from napkin.checkpoint.folder import checkpoint_paths
from napkin.errors import NapkinError
from napkin.recipe.training_config import TrainingConfig
from napkin.units import format_bytes

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
    needed, free = size_bytes + _OVERHEAD_BYTES, _free_bytes(folder)
    if free < needed:
        raise NapkinError(
            f"the next checkpoint takes {format_bytes(needed)}, the disk of '{folder}' has {format_bytes(free)} free: "
            f"make room and continue with `napkin resume {folder.parent}`, earlier checkpoints are kept"
        )


def refuse_too_small_disk(run: Path, size_bytes: int, frozen_bytes: int = 0) -> None:
    """Raise NapkinError where the disk has no space for the frozen weights and a single checkpoint of a run that has no
    folder yet."""
    needed, free = size_bytes + frozen_bytes + _OVERHEAD_BYTES, _free_bytes(run)
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
    needed, free = missing * (size_bytes + _OVERHEAD_BYTES), _free_bytes(folder)
    if missing <= 0 or free >= needed:
        return None
    return (
        f"the run will keep up to {kept} checkpoints of {format_bytes(size_bytes)} and writes one more beside them, "
        f"the disk of '{folder}' has {format_bytes(free)} free: make room for {format_bytes(needed - free)} "
        "more before they are written, or lower --training.keep-checkpoints"
    )


def _free_bytes(path: Path) -> int:
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free
