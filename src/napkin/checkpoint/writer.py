"""Checkpoints while training goes on: it waits for a copy of the tensors, a thread does the rest.

Writing, syncing, checksums, renaming and pruning take seconds per gigabyte; the copy takes a tenth of one. There is one
write at a time and one copy, into host memory that is made once; on a GPU it is page-locked, and the copy is queued
behind the step's kernels.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from napkin.checkpoint.disk_space import refuse_full_disk
from napkin.checkpoint.folder import checkpoint_path, checkpoint_paths, prune_checkpoints
from napkin.checkpoint.state import Checkpoint, Snapshot, State
from napkin.checkpoint.write import write_checkpoint
from napkin.optim.shards import like, local
from napkin.runs.history import History, best_step


class CheckpointWriter:
    """Writes the checkpoints of one run, in the background or not, and prunes them.

    Used as a context: it is left when the write under way has ended, with the error of the writer if there was one.
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

        Waits for an earlier write. Raises NapkinError where that has failed, or where the disk is too full for this.
        """
        self.wait()
        self._begun = taken.step
        if not checkpoint_path(self.folder, taken.step).exists():
            refuse_full_disk(self.folder, taken.bytes)
        if not self.background:
            self._written = self._write(taken, prune)
            return
        copied, ready = self._buffers.copy(taken)
        self._thread = threading.Thread(
            target=self._write_and_remember, args=(copied, ready, prune), name="checkpoint writer", daemon=True
        )
        self._thread.start()

    def lacks(self, step: int, history: History) -> bool:
        """Whether the best checkpoint is to be kept and that of `step`, just evaluated, would be it.

        It is held against those on the disk, the one being written among them, and not against evaluations of weights
        that nobody has any more. Of evaluations that scatter around a plateau few are so: of n, ln n + 0.58 on average
        (records of independent draws; Rényi 1962).
        """
        there = {*_steps(self.folder), *([] if self._begun is None else [self._begun])}
        return self.keep_best and best_step(dict(history.validation_losses), [*there - {step}, step]) == step

    def refuse_failure(self) -> None:
        """Raise the error of a write in the background that has failed; to be asked at each step."""
        if self._error is not None:
            self.wait()

    def wait(self) -> Checkpoint | None:
        """Return the checkpoint written last, when it is on the disk; raise what its writing met."""
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
        # A second Ctrl-C means now: what is not renamed yet is as if it had never begun.
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
        """Remove what is kept no longer, now that `written` is there."""
        self._losses |= dict(written.state.history.validation_losses)
        best = best_step(self._losses, _steps(self.folder)) if self.keep_best else None
        prune_checkpoints(self.folder, keep=self.keep, best=best)


class _HostBuffers:
    """Host memory in the likeness of a snapshot's tensors, made at the first copy and used again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, taken: Snapshot) -> tuple[Snapshot, Callable[[], None]]:
        """The same with tensors of its own, and a function that returns when they hold what they should.

        From a GPU they are copied by its own stream, behind the kernels of the last step and before those of the next.
        """
        tensors = {
            file: {name: self._copy_one((file, name), tensor) for name, tensor in named.items()}
            for file, named in taken.tensors.items()
        }
        ready: Callable[[], None] = lambda: None  # noqa: E731
        if any(tensor.is_cuda for named in taken.tensors.values() for tensor in named.values()):
            event = torch.cuda.Event()
            event.record()
            ready = event.synchronize
        return Snapshot(taken.step, tensors, taken.state), ready

    def _copy_one(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        buffer, here = self._buffers.get(key), local(tensor)
        if buffer is None or buffer.shape != here.shape or buffer.dtype != here.dtype:
            buffer = self._buffers[key] = _host_memory(here)
        return like(tensor, buffer.copy_(here, non_blocking=True))


def _host_memory(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        # Where the system locks no more pages, the copy is slower and no other.
        with contextlib.suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint_paths(folder)]


def _validation_losses(folder: Path) -> dict[int, float]:
    """Of the steps that the checkpoints on the disk tell of; a damaged one tells of none."""
    losses: dict[int, float] = {}
    for path in reversed(checkpoint_paths(folder)):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            state = msgspec.json.decode((path / "state.json").read_bytes(), type=State)
            losses |= dict(state.history.validation_losses)
    return losses
