"""The predicted cost of checkpoints: bytes on the disk, and the copy in memory that they are written from."""

import psutil
import torch

from napkin.checkpoint.disk_space import checkpoint_bytes, kept_checkpoints
from napkin.errors import NapkinError
from napkin.planning.run_plan import Plan
from napkin.units import format_bytes


def whole_checkpoint_bytes(plan: Plan) -> int:
    """Bytes of the files of all ranks together."""
    return checkpoint_bytes(plan.ledger) * (plan.site.n_devices if plan.resolved.strategy == "fsdp" else 1)


def writes_in_background(plan: Plan) -> bool:
    """Whether a background thread writes the checkpoints: if the recipe says so, or leaves it open and the copy fits.

    On a CPU the copy is in the same memory as the step's tensors, so both must fit; with a GPU it may take half of the
    host's free memory. Raises NapkinError where the recipe asks for a copy that does not fit.
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
            # Each rank of this machine copies its own rows.
            free //= max(1, min(plan.site.n_devices, torch.cuda.device_count()))
    if copy_bytes <= free:
        return True
    if training.checkpoint_writing == "auto":
        return False
    raise NapkinError(
        f"training.checkpoint_writing is 'background', whose copy takes {format_bytes(copy_bytes)} of host memory, "
        f"but only {format_bytes(max(0, free))} are free: use 'wait' or 'auto'"
    )


def describe_checkpoints(plan: Plan) -> str:
    """One line on the cost of checkpoints."""
    copy_bytes, size = checkpoint_bytes(plan.ledger), whole_checkpoint_bytes(plan)
    kept = kept_checkpoints(plan.recipe.training)
    how = "by the training loop"
    if writes_in_background(plan):
        copied = format_bytes(copy_bytes)
        how = f"in the background, from a copy of {copied} in host memory, which no figure above includes"
    return (
        f"checkpoints: {format_bytes(size)} each, up to {kept} kept, {format_bytes((kept + 1) * size)} of disk while "
        f"one is written; written {how}"
    )
