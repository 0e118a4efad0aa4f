"""Writing a checkpoint atomically: to a folder with a hidden name, every file synced, then renamed."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from napkin.checkpoint.checksums import TENSOR_FILES, write_state
from napkin.checkpoint.folder import checkpoint_path, read_checkpoint, set_aside
from napkin.checkpoint.frozen_file import keep_frozen
from napkin.checkpoint.state import Checkpoint, Snapshot, State, snapshot
from napkin.checkpoint.stored_tensors import is_finite, write_tensors
from napkin.errors import CorruptFile, NapkinError
from napkin.files import sync_folder
from napkin.runs.history import History
from napkin.runs.run_folder import lower_learning_rate
from napkin.train_step.step import TrainState


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
    """Write `folder`/step-XXXXXXXX and return it: `snapshot` and `write_checkpoint` in one; with adapters also
    `folder`/frozen, unless it is there."""
    taken = snapshot(
        train_state,
        step=step,
        seconds=seconds,
        tokenizer=tokenizer,
        train_tokens=train_tokens,
        history=history,
        frozen=keep_frozen(folder, train_state.model),
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
            return read_checkpoint(path, verify_frozen=False)
        except CorruptFile:
            set_aside(path)
    refuse_non_finite(taken, folder)
    draft = folder / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        draft.mkdir()
        sums = {name: write_tensors(draft / name, taken.files[name]) for name in TENSOR_FILES}
        write_state(draft, taken.state, sums, frozen=taken.frozen)
        before_publishing()
        draft.rename(path)
        sync_folder(folder)
    except (OSError, SafetensorError, NapkinError) as error:
        raise NapkinError(cannot_be_written(path, error)) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Checkpoint(path, msgspec.json.decode(taken.state, type=State), taken.frozen)


def cannot_be_written(path: Path, error: Exception) -> str:
    """The message where a checkpoint cannot be written."""
    return (
        f"'{path}' cannot be written ({error}): make room and continue with `napkin resume {path.parent.parent}`, "
        "earlier checkpoints are kept"
    )


def refuse_non_finite(taken: Snapshot, folder: Path) -> None:
    """Raise NapkinError where a number is infinite or NaN."""
    for named in taken.files.values():
        for name, parts in named.items():
            if not all(is_finite(part.tensor) for part in parts):
                raise NapkinError(
                    f"step {taken.step}: tensor '{name}' holds infinity or NaN, no checkpoint is written: "
                    f"{lower_learning_rate(folder.parent)}"
                )
