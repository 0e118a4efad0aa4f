"""What checkpoints take by plan: bytes on the disk, and the copy in memory that they are written from."""

import psutil
import torch

from napkin.checkpoint.disk_space import checkpoint_bytes, kept_checkpoints
from napkin.errors import NapkinError
from napkin.planning.run_plan import Plan
from napkin.units import format_bytes


def whole_checkpoint_bytes(plan: Plan) -> int:
    """What the files of all ranks take together."""
    return checkpoint_bytes(plan.ledger) * (plan.site.n_devices if plan.resolved.strategy == "fsdp" else 1)


def writes_in_background(plan: Plan) -> bool:
    """Whether a thread writes the checkpoints: where the recipe says so, or leaves it open and there is room.

    On a CPU the copy lies beside the step's tensors, and both are counted; beside a GPU it may take half of what the
    host has free. Raises NapkinError where the recipe asks for a copy that there is no room for.
    """
    training = plan.recipe.training
    if training.checkpoint_writing == "wait":
        return False
    copy_bytes = checkpoint_bytes(plan.ledger)
    if plan.resolved.precision.device_type == "cpu":
        free = plan.site.memory_bytes - plan.ledger.peak_bytes
    else:
        free = psutil.virtual_memory().available // 2
        if plan.resolved.strategy == "fsdp":
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


def describe_checkpoints(plan: Plan) -> str:
    """A line on what checkpoints take."""
    copy_bytes, size = checkpoint_bytes(plan.ledger), whole_checkpoint_bytes(plan)
    kept = kept_checkpoints(plan.recipe.training)
    how = "by the loop"
    if writes_in_background(plan):
        how = f"in the background, from a copy of {format_bytes(copy_bytes)} in host memory that is in no figure above"
    return (
        f"checkpoints: {format_bytes(size)} each, up to {kept} kept, {format_bytes((kept + 1) * size)} of disk while "
        f"one is written; written {how}"
    )
