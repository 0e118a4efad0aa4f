"""Checkpoints written in the background: training waits for a copy of the tensors only, a thread writes them.

Writing, syncing, checksums, renaming and pruning take seconds per gigabyte; the copy takes a tenth of a second. There
is one write at a time and one copy, into host memory that is allocated once; with a GPU it is page-locked, and the copy
is queued behind the step's kernels.
A checkpoint is written to a folder with a hidden name, every file synced, then renamed.
"""

import contextlib
import dataclasses
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from napkin.checkpoint.folder import (
    checkpoint_path,
    checkpoint_paths,
    prune_checkpoints,
    read_checkpoint,
    refuse_full_disk,
    set_aside,
)
from napkin.checkpoint.shard_files import is_finite, write_state, write_tensors
from napkin.checkpoint.state import Checkpoint, Snapshot, State, keep_frozen, snapshot
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import CorruptFile, NapkinError
from napkin.files import read_bytes, sync_folder
from napkin.optim.tensor_parts import Part
from napkin.runs.metrics import History, best_step
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
    folder: Path, taken: Snapshot, *, before_publishing: Callable[[], None] = lambda: None, ranks: Ranks = ALONE
) -> Checkpoint:
    """Write `folder`/step-XXXXXXXX and return it; one that exists already and is intact is kept.

    Tensors on a CPU are written without a copy. `before_publishing` is called when everything is on the disk, right
    before the folder is renamed. With several `ranks` this is a collective: each rank writes the files of its own
    snapshot to one hidden folder. Raises NapkinError where the disk is full or cannot be written, and where a tensor
    holds infinity or NaN; earlier checkpoints are unchanged.
    """
    path = checkpoint_path(folder, taken.step)
    name = ranks.broadcast_from_zero(lambda: _begin(path))
    if name is None:
        return read_checkpoint(path, verify=False)
    draft = folder / name

    def finish() -> str | None:
        try:
            problem = next((report["problem"] for report in reports if report["problem"]), None)
            if problem is None:
                sums = {name: checksum for report in reports for name, checksum in report["sums"].items()}
                write_state(draft, taken.state, sums, frozen=taken.frozen)
                before_publishing()
                draft.rename(path)
                sync_folder(folder)
            return problem
        except (OSError, NapkinError) as error:
            return cannot_be_written(path, error)

    try:
        reports = ranks.all_gather(_write_files(draft, taken, path))
        problem = ranks.broadcast_from_zero(finish)
    finally:
        if ranks.is_rank_zero:
            shutil.rmtree(draft, ignore_errors=True)
    if problem:
        raise NapkinError(problem)
    return Checkpoint(path, msgspec.json.decode(taken.state, type=State), taken.frozen)


def _begin(path: Path) -> str | None:
    """The name of a new hidden folder to write to; None where an intact checkpoint exists already."""
    if path.exists():
        with contextlib.suppress(CorruptFile):
            read_checkpoint(path, verify_frozen=False)
            return None
        set_aside(path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        draft.mkdir()
    except OSError as error:
        raise NapkinError(cannot_be_written(path, error)) from None
    return draft.name


def _write_files(draft: Path, taken: Snapshot, path: Path) -> dict[str, Any]:
    """Write a snapshot's files. Returns their checksums, or the error message."""
    sums: dict[str, str] = {}
    try:
        refuse_non_finite(taken, path.parent)
        for name, tensors in taken.files.items():
            sums[name] = write_tensors(draft / name, tensors)
    except NapkinError as error:
        return {"sums": sums, "problem": str(error)}
    except (OSError, SafetensorError) as error:
        return {"sums": sums, "problem": cannot_be_written(path, error)}
    return {"sums": sums, "problem": None}


def cannot_be_written(path: Path, error: Exception) -> str:
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


class CheckpointWriter:
    """Writes the checkpoints of one run, in the background or not, and prunes them.

    A context manager: leaving it waits for the current write, and raises its error.
    """

    def __init__(
        self,
        folder: Path,
        *,
        background: bool,
        keep: int,
        keep_best: bool,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.background = background
        self.keep = keep
        self.keep_best = keep_best
        self.before_publishing = before_publishing
        self._buffers = _HostBuffers()
        self._losses = _validation_losses(folder)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: Checkpoint | None = None
        self._begun: int | None = None

    def save(self, taken: Snapshot, *, prune: bool = True) -> None:
        """Write a checkpoint; in the background, return as soon as its tensors are copied.

        Waits for an earlier write. Raises NapkinError where that has failed, or where the disk is too full.
        """
        self.wait()
        self._begun = taken.step
        if not checkpoint_path(self.folder, taken.step).exists():
            self.refuse_full_disk(taken)
        if not self.background:
            self._written = self._write(taken, prune)
            return
        copied, ready = self._buffers.copy(taken)
        self._thread = threading.Thread(
            target=self._write_and_remember, args=(copied, ready, prune), name="checkpoint writer", daemon=True
        )
        self._thread.start()

    def bytes_of(self, taken: Snapshot) -> int:
        """Bytes of the files of a checkpoint, all ranks' together."""
        return taken.bytes

    def refuse_full_disk(self, taken: Snapshot) -> None:
        """Raise NapkinError where the disk has no space for a checkpoint."""
        refuse_full_disk(self.folder, self.bytes_of(taken))

    def lacks(self, step: int, history: History) -> bool:
        """True where a checkpoint of `step`, just evaluated, is to be written because it would be the best one.

        It is compared with the checkpoints on the disk and the one being written, not with evaluations of weights that
        were not kept. On a plateau few evaluations are a new best: ln n + 0.58 of n on average (records of independent
        draws; Rényi 1962).
        """
        steps = {*_steps(self.folder), *([] if self._begun is None else [self._begun])}
        return self.keep_best and best_step(dict(history.validation_losses), [*steps - {step}, step]) == step

    def refuse_failure(self) -> None:
        """Raise the error of a failed write in the background; called at each step."""
        if self._error is not None:
            self.wait()

    def wait(self) -> Checkpoint | None:
        """Wait for the current write. Returns the last checkpoint, or raises the error of its write."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._written

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # A second Ctrl-C does not wait: a folder that is not renamed yet is ignored.
        if kind is None or issubclass(kind, Exception):
            self.wait()

    def _write_and_remember(self, taken: Snapshot, ready: Callable[[], None], prune: bool) -> None:
        try:
            ready()
            self._written = self._write(taken, prune)
        except BaseException as error:
            self._error = error

    def _write(self, taken: Snapshot, prune: bool) -> Checkpoint:
        written = write_checkpoint(self.folder, taken, before_publishing=self.before_publishing)
        if prune:
            self.prune(written)
        return written

    def prune(self, written: Checkpoint) -> None:
        """Remove checkpoints that are not kept any longer, after `written`."""
        self._losses |= dict(written.state.history.validation_losses)
        best = best_step(self._losses, _steps(self.folder)) if self.keep_best else None
        prune_checkpoints(self.folder, keep=self.keep, best=best)


class _HostBuffers:
    """Host memory for the tensors of a snapshot, allocated at the first copy and reused."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str, int], Tensor] = {}

    def copy(self, taken: Snapshot) -> tuple[Snapshot, Callable[[], None]]:
        """Copy a snapshot. Returns the copy, and a function that waits until it is complete.

        Copies from a GPU are queued on its current stream, between the kernels of the last step and of the next one.
        """
        files = {
            file: {
                name: [self._copy_one((file, name, number), part) for number, part in enumerate(parts)]
                for name, parts in named.items()
            }
            for file, named in taken.files.items()
        }
        ready: Callable[[], None] = lambda: None  # noqa: E731
        if any(part.tensor.is_cuda for part in taken.parts()):
            event = torch.cuda.Event()
            event.record()
            ready = event.synchronize
        return dataclasses.replace(taken, files=files), ready

    def _copy_one(self, key: tuple[str, str, int], part: Part) -> Part:
        buffer, here = self._buffers.get(key), part.tensor
        if buffer is None or buffer.shape != here.shape or buffer.dtype != here.dtype:
            buffer = self._buffers[key] = _host_memory(here)
        return dataclasses.replace(part, tensor=buffer.copy_(here, non_blocking=True))


def _host_memory(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        # Without page-locked memory the copy is slower, but the same.
        with contextlib.suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint_paths(folder)]


def _validation_losses(folder: Path) -> dict[int, float]:
    """Validation losses by step, from the checkpoints on the disk; damaged ones are ignored."""
    losses: dict[int, float] = {}
    for path in reversed(checkpoint_paths(folder)):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            state = msgspec.json.decode(read_bytes(path / "state.json"), type=State)
            losses |= dict(state.history.validation_losses)
    return losses
