"""Checkpoints of several ranks: rank 0 writes all of it, or each rank its own rows of a sharded model.

A sharded checkpoint is published atomically too: ranks write to a hidden folder, each in a thread while training
continues; when every file is on the disk, rank 0 adds the checksums and renames the folder. It can be loaded by any
number of ranks, or by one process.
"""

import contextlib
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from napkin.checkpoint.checksums import checksum_of, write_state
from napkin.checkpoint.folder import checkpoint_path, read_checkpoint, set_aside
from napkin.checkpoint.load import load_train_state
from napkin.checkpoint.restore import restore_newest
from napkin.checkpoint.shard_files import shard_name, write_rows
from napkin.checkpoint.state import Checkpoint, Snapshot, State
from napkin.checkpoint.write import cannot_be_written, refuse_non_finite
from napkin.checkpoint.writer import CheckpointWriter
from napkin.distributed.ranks import Ranks
from napkin.errors import CorruptFile, NapkinError
from napkin.files import sync_file, sync_folder
from napkin.optim.sharded_tensors import is_sharded, local
from napkin.recipe.recipe import Recipe
from napkin.train_step.step import TrainState


def restore_on_ranks(
    ranks: Ranks, folder: Path, train_state: TrainState, *, on_message: Callable[[str], None], **text: str
) -> Checkpoint | None:
    """`restore_newest` on several ranks: rank 0 finds the newest intact checkpoint, and all ranks load it."""
    restored: list[Checkpoint | None] = []

    def restore() -> str | None:
        restored.append(restore_newest(folder, train_state, on_message=on_message, **text))
        return None if restored[0] is None else restored[0].path.name

    name = ranks.broadcast_from_zero(restore)
    if ranks.is_rank_zero:
        return restored[0]
    if name is None:
        return None
    checkpoint = read_checkpoint(folder / name, verify=False)
    load_train_state(checkpoint, train_state)
    return checkpoint


def open_writer(ranks: Ranks, recipe: Recipe, folder: Path, **options: Any) -> CheckpointWriter:
    """The checkpoint writer of this rank: with fsdp each rank writes its own rows, otherwise rank 0 writes.

    `options` are CheckpointWriter's; with fsdp, rank 0 decides whether checkpoints are written in the background.
    """
    if ranks.world_size > 1 and recipe.training.parallelism == "fsdp":
        return _ShardWriter(
            ranks, folder, **options | {"background": ranks.broadcast_from_zero(lambda: options["background"])}
        )
    return CheckpointWriter(folder, **options) if ranks.is_rank_zero else _ReadOnlyWriter(folder, **options)


class _ReadOnlyWriter(CheckpointWriter):
    """Writes nothing: returns the checkpoints that rank 0 writes."""

    def _write(self, taken: Snapshot, prune: bool) -> Checkpoint:
        return Checkpoint(checkpoint_path(self.folder, taken.step), msgspec.json.decode(taken.state, type=State))


class _ShardWriter(CheckpointWriter):
    """Writes this rank's rows of each checkpoint.

    The writer threads use a separate process group, so that they can communicate while the ranks train.
    """

    def __init__(self, ranks: Ranks, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.ranks = ranks
        self._writing = ranks.separate_group()

    def refuse_failure(self) -> None:
        """Raise the error of a write in the background, on all ranks after the same step; all ranks call this at each
        step."""
        if self._thread is None:
            return
        is_running = self._thread.is_alive()
        progress = _RUNNING if is_running else _DONE if self._error is None else _FAILED
        if self.ranks.all_reduce_max(progress) != _RUNNING:
            self.wait()

    def _write(self, taken: Snapshot, prune: bool) -> Checkpoint:
        written = _save_sharded(self._writing, self.folder, taken, self.before_publishing)
        if prune and self.ranks.is_rank_zero:
            self.prune(written)
        return written


_DONE, _RUNNING, _FAILED = range(3)


def _save_sharded(ranks: Ranks, folder: Path, taken: Snapshot, before_publishing: Callable[[], None]) -> Checkpoint:
    path = checkpoint_path(folder, taken.step)
    name = ranks.broadcast_from_zero(lambda: _begin(path))
    if name is None:
        return read_checkpoint(path, verify=False)
    draft = folder / name
    reports = ranks.all_gather(_write_rows(ranks, draft, taken, path))
    problems = [report["problem"] for report in reports if report["problem"]]
    sums = {name: checksum for report in reports for name, checksum in report["sums"].items()}

    def finish() -> str | None:
        try:
            if problems:
                return problems[0]
            write_state(draft, taken.state, sums)
            before_publishing()
            draft.rename(path)
            sync_folder(folder)
        except (OSError, NapkinError) as error:
            return cannot_be_written(path, error)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return None

    problem = ranks.broadcast_from_zero(finish)
    if problem:
        raise NapkinError(problem)
    return Checkpoint(path, msgspec.json.decode(taken.state, type=State))


def _begin(path: Path) -> str | None:
    """The name of a new hidden folder to write to; None where an intact checkpoint exists already."""
    if path.exists():
        with contextlib.suppress(CorruptFile):
            read_checkpoint(path)
            return None
        set_aside(path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        draft.mkdir()
    except OSError as error:
        raise NapkinError(cannot_be_written(path, error)) from None
    return draft.name


def _write_rows(ranks: Ranks, draft: Path, taken: Snapshot, path: Path) -> dict[str, Any]:
    """Write this rank's files. Returns their checksums, or the error message."""
    sums: dict[str, str] = {}
    try:
        tensors = {name: _of_this_rank(ranks, named) for name, named in taken.tensors.items()}
        here = {name: {key: local(tensor) for key, tensor in named.items()} for name, named in tensors.items()}
        refuse_non_finite(here, taken.step, path.parent)
        for name, named in tensors.items():
            file = draft / shard_name(Path(name).stem, ranks.info.rank, ranks.world_size)
            write_rows(file, named)
            # safetensors creates files that only their owner can read.
            file.chmod(draft.stat().st_mode & 0o666)
            sync_file(file)
            sums[file.name] = checksum_of(file)
    except NapkinError as error:
        return {"sums": sums, "problem": str(error)}
    except (OSError, SafetensorError) as error:
        return {"sums": sums, "problem": cannot_be_written(path, error)}
    return {"sums": sums, "problem": None}


def _of_this_rank(ranks: Ranks, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that this rank holds rows of; rank 0 writes those that are not sharded."""
    return {
        name: tensor
        for name, tensor in named.items()
        if local(tensor).numel() and (is_sharded(tensor) or ranks.is_rank_zero)
    }
