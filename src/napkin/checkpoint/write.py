"""Writing a checkpoint atomically: to a folder with a hidden name, every file synced, then renamed."""

import math
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from napkin.checkpoint.checksums import TENSOR_FILES, checksum_of, write_state
from napkin.checkpoint.folder import checkpoint_path, read_checkpoint, set_aside
from napkin.checkpoint.parts import Parts
from napkin.checkpoint.shard_files import write_parts
from napkin.checkpoint.state import Checkpoint, Snapshot, State, snapshot
from napkin.errors import CorruptFile, NapkinError
from napkin.files import sync_file, sync_folder
from napkin.runs.history import History
from napkin.runs.run_folder import lower_learning_rate
from napkin.train_step.step import TrainState

# Torch parallelises reductions of more elements.
_SERIAL_NUMEL = 2**15


def save_checkpoint(
    folder: Path,
    train_state: TrainState,
    *,
    step: int,
    seconds: float,
    tokenizer: str,
    train_tokens: str,
    history: History | None = None,
) -> Checkpoint:
    """Write `folder`/step-XXXXXXXX and return it: `snapshot` and `write_checkpoint` in one."""
    taken = snapshot(
        train_state, step=step, seconds=seconds, tokenizer=tokenizer, train_tokens=train_tokens, history=history
    )
    return write_checkpoint(folder, taken)


def write_checkpoint(
    folder: Path, taken: Snapshot, *, before_publishing: Callable[[], None] = lambda: None
) -> Checkpoint:
    """Write `folder`/step-XXXXXXXX and return it; one that exists already and is intact is kept.

    Tensors on a CPU are written without a copy. `before_publishing` is called when everything is on the disk, right
    before the folder is renamed. Raises NapkinError where the disk is full or cannot be written, and where a tensor
    holds infinity or NaN; earlier checkpoints are unchanged.
    """
    path = checkpoint_path(folder, taken.step)
    if path.exists():
        try:
            return read_checkpoint(path)
        except CorruptFile:
            set_aside(path)
    refuse_non_finite(taken, folder)
    draft = folder / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        draft.mkdir()
        write_state(draft, taken.state, {name: write_tensors(draft / name, taken.files[name]) for name in TENSOR_FILES})
        before_publishing()
        draft.rename(path)
        sync_folder(folder)
    except (OSError, SafetensorError, NapkinError) as error:
        raise NapkinError(cannot_be_written(path, error)) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Checkpoint(path, msgspec.json.decode(taken.state, type=State))


def cannot_be_written(path: Path, error: Exception) -> str:
    """The message where a checkpoint cannot be written."""
    return (
        f"'{path}' cannot be written ({error}): make room and continue with `napkin resume {path.parent.parent}`, "
        "earlier checkpoints are kept"
    )


def write_tensors(path: Path, tensors: Parts) -> str:
    """Write a file of tensors, or of parts of them, to the disk; its folder exists. Returns its checksum."""
    write_parts(path, tensors)
    # safetensors creates files that only their owner can read; a run's other files follow the user's umask.
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync_file(path)
    return checksum_of(path)


def refuse_non_finite(taken: Snapshot, folder: Path) -> None:
    """Raise NapkinError where a number is infinite or NaN."""
    for named in taken.files.values():
        for name, parts in named.items():
            if not all(_is_finite(part.tensor) for part in parts):
                raise NapkinError(
                    f"step {taken.step}: tensor '{name}' holds infinity or NaN, no checkpoint is written: "
                    f"{lower_learning_rate(folder.parent)}"
                )


def _is_finite(tensor: Tensor) -> bool:
    """True if every element is finite; on a CPU computed by a single thread, as the others may be training."""
    pieces = tensor.detach().flatten().split(_SERIAL_NUMEL) if tensor.device.type == "cpu" else [tensor]
    return all(math.isfinite(each.item()) for piece in pieces if piece.numel() for each in torch.aminmax(piece))
