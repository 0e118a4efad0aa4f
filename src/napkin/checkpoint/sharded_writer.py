"""Checkpoints of several ranks: one of them writes for all, or each its own rows of a model that is spread over them.

A sharded checkpoint is as whole as any other: ranks write aside, each in a thread while training goes on, and when
every file is on the disk the first one adds the checksums and renames. What it holds is loaded by any number of ranks,
or by one process.
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
from napkin.checkpoint.write import refuse_non_finite
from napkin.checkpoint.writer import CheckpointWriter
from napkin.distributed.ranks import Ranks
from napkin.errors import CorruptFile, NapkinError
from napkin.files import sync_file, sync_folder
from napkin.optim.shards import is_sharded, local
from napkin.recipe.recipe import Recipe
from napkin.train_step.step import TrainState


def restore_on_ranks(
    ranks: Ranks, folder: Path, train_state: TrainState, *, on_message: Callable[[str], None], **text: str
) -> Checkpoint | None:
    """`restore_newest` with ranks: the first one finds the newest that is whole, and all load that."""
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
    """What writes the checkpoints of a run on this rank: the first one all of them, or each one the rows that it has.

    `options` are CheckpointWriter's; whether rows are written in the background is for the first rank to say.
    """
    if ranks.world_size > 1 and recipe.training.parallelism == "fsdp":
        return _ShardWriter(
            ranks, folder, **options | {"background": ranks.broadcast_from_zero(lambda: options["background"])}
        )
    return CheckpointWriter(folder, **options) if ranks.is_rank_zero else _Follower(folder, **options)


class _Follower(CheckpointWriter):
    """Knows of the checkpoints that the first rank writes."""

    def _write(self, taken: Snapshot, prune: bool) -> Checkpoint:
        return Checkpoint(checkpoint_path(self.folder, taken.step), msgspec.json.decode(taken.state, type=State))


class _ShardWriter(CheckpointWriter):
    """Writes this rank's rows of each.

    Ranks come to agree on a checkpoint apart from what they say while training: their threads may write meanwhile.
    """

    def __init__(self, ranks: Ranks, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.ranks = ranks
        self._writing = ranks.separate_group()

    def refuse_failure(self) -> None:
        """Raise the error of a write in the background, on all ranks after the same step; all ask at each."""
        if self._thread is None:
            return
        under_way = self._thread.is_alive()
        progress = _UNDER_WAY if under_way else _DONE if self._error is None else _FAILED
        if self.ranks.all_reduce_max(progress) != _UNDER_WAY:
            self.wait()

    def _write(self, taken: Snapshot, prune: bool) -> Checkpoint:
        written = _save_sharded(self._writing, self.folder, taken, self.before_publishing)
        if prune and self.ranks.is_rank_zero:
            self.prune(written)
        return written


_DONE, _UNDER_WAY, _FAILED = range(3)


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
            return _cannot_be_written(path, error)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return None

    problem = ranks.broadcast_from_zero(finish)
    if problem:
        raise NapkinError(problem)
    return Checkpoint(path, msgspec.json.decode(taken.state, type=State))


def _begin(path: Path) -> str | None:
    """The name of a new folder to write into; None where the checkpoint is there already, and whole."""
    if path.exists():
        with contextlib.suppress(CorruptFile):
            read_checkpoint(path)
            return None
        set_aside(path)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        draft.mkdir()
    except OSError as error:
        raise NapkinError(_cannot_be_written(path, error)) from None
    return draft.name


def _write_rows(ranks: Ranks, draft: Path, taken: Snapshot, path: Path) -> dict[str, Any]:
    """Write this rank's files; their checksums, or what went wrong."""
    sums: dict[str, str] = {}
    try:
        tensors = {name: _of_this_rank(ranks, named) for name, named in taken.tensors.items()}
        here = {name: {key: local(tensor) for key, tensor in named.items()} for name, named in tensors.items()}
        refuse_non_finite(here, taken.step, path.parent)
        for name, named in tensors.items():
            file = draft / shard_name(Path(name).stem, ranks.info.rank, ranks.world_size)
            write_rows(file, named)
            # The library makes files for their owner alone.
            file.chmod(draft.stat().st_mode & 0o666)
            sync_file(file)
            sums[file.name] = checksum_of(file)
    except NapkinError as error:
        return {"sums": sums, "problem": str(error)}
    except (OSError, SafetensorError) as error:
        return {"sums": sums, "problem": _cannot_be_written(path, error)}
    return {"sums": sums, "problem": None}


def _of_this_rank(ranks: Ranks, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that this rank has rows of; the first one writes what all have whole."""
    return {
        name: tensor
        for name, tensor in named.items()
        if local(tensor).numel() and (is_sharded(tensor) or ranks.is_rank_zero)
    }


def _cannot_be_written(path: Path, error: Exception) -> str:
    return (
        f"'{path}' cannot be written ({error}): make room and continue with `napkin resume {path.parent.parent}`, "
        "earlier checkpoints are kept"
    )
