"""Room for checkpoints: on the disk for the next one, in the host's memory for the copy that it is written from."""

import shutil
from pathlib import Path

import psutil
import torch

from napkin.accounting.ledger import Ledger
from napkin.accounting.plan import Plan
from napkin.checkpoint.checkpoint import checkpoint_paths
from napkin.errors import NapkinError
from napkin.recipe.recipe import TrainingConfig
from napkin.units import format_bytes

# Names, checksums, and what a file system rounds up to.
_BESIDES_BYTES = 2**17


def checkpoint_bytes(ledger: Ledger) -> int:
    """What a checkpoint takes, by count: parameters and optimizer state."""
    return sum(ledger.peak_by_category.get(category, 0) for category in ("parameters", "optimizer state"))


def _whole_checkpoint_bytes(plan: Plan) -> int:
    """What the files of all ranks take together."""
    return checkpoint_bytes(plan.ledger) * (plan.site.n_devices if plan.site.sharded else 1)


def writes_in_background(training: TrainingConfig, plan: Plan, device_type: str) -> bool:
    """Whether a thread writes the checkpoints: where the recipe says so, or leaves it open and there is room.

    On a CPU the copy lies beside the step's tensors, and both are counted; beside a GPU it may take half of what the
    host has free. Raises NapkinError where the recipe asks for a copy that there is no room for.
    """
    if training.checkpoint_writing == "wait":
        return False
    copy_bytes = checkpoint_bytes(plan.ledger)
    if device_type == "cpu":
        free = plan.site.memory_bytes - plan.ledger.peak_bytes
    else:
        free = psutil.virtual_memory().available // 2
        if plan.site.sharded:
            # Each of this machine's ranks copies the rows that it has.
            free //= max(1, min(plan.site.n_devices, torch.cuda.device_count()))
    if copy_bytes <= free:
        return True
    if training.checkpoint_writing == "auto":
        return False
    raise NapkinError(
        f"training.checkpoint_writing is 'background', whose copy takes {format_bytes(copy_bytes)} of host memory, "
        f"{format_bytes(max(0, free))} are left for it: use 'wait' or 'auto'"
    )


def describe_checkpoints(training: TrainingConfig, plan: Plan, device_type: str) -> str:
    """A line on what checkpoints take."""
    copy_bytes, size = checkpoint_bytes(plan.ledger), _whole_checkpoint_bytes(plan)
    kept = kept_checkpoints(training)
    how = "by the loop"
    if writes_in_background(training, plan, device_type):
        how = f"in the background, from a copy of {format_bytes(copy_bytes)} in host memory that is in no figure above"
    return (
        f"checkpoints: {format_bytes(size)} each, up to {kept} kept, {format_bytes((kept + 1) * size)} of disk while "
        f"one is written; written {how}"
    )


def kept_checkpoints(training: TrainingConfig) -> int:
    """Most that a run keeps: the newest and the best."""
    return training.keep_checkpoints + training.keep_best


def refuse_full_disk(folder: Path, taken_bytes: int) -> None:
    """Raise NapkinError where the disk has no room for a checkpoint; quotas and limits show when it is written."""
    needed, free = taken_bytes + _BESIDES_BYTES, _free_bytes(folder)
    if free < needed:
        raise NapkinError(
            f"the next checkpoint takes {format_bytes(needed)}, the disk of '{folder}' has {format_bytes(free)} free: "
            f"make room and continue with `napkin resume {folder.parent}`, earlier checkpoints are kept"
        )


def refuse_too_small_disk(run: Path, plan: Plan) -> None:
    """Raise NapkinError where the disk has no room for a single checkpoint of a run that has no folder yet."""
    needed, free = _whole_checkpoint_bytes(plan) + _BESIDES_BYTES, _free_bytes(run)
    if free < needed:
        raise NapkinError(
            f"a checkpoint takes {format_bytes(needed)}, the disk of '{run}' has {format_bytes(free)} free: "
            "make room, or choose a --run elsewhere"
        )


def disk_warning(folder: Path, taken_bytes: int, training: TrainingConfig) -> str | None:
    """What to say before a run whose disk has room for the next checkpoint, but not for all that it will keep."""
    kept = kept_checkpoints(training)
    # One more is written before the oldest goes.
    missing = kept + 1 - len(checkpoint_paths(folder))
    needed, free = missing * (taken_bytes + _BESIDES_BYTES), _free_bytes(folder)
    if missing <= 0 or free >= needed:
        return None
    return (
        f"the run will keep up to {kept} checkpoints of {format_bytes(taken_bytes)} and writes one more beside them, "
        f"the disk of '{folder}' has {format_bytes(free)} free: make {format_bytes(needed - free)} of room before "
        "they come, or lower --training.keep-checkpoints"
    )


def _free_bytes(path: Path) -> int:
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free
