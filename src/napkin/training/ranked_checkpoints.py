"""Checkpoints of several ranks: one of them writes for all, or each its own rows of a model that is spread over them.

A sharded checkpoint is as whole as any other: ranks write aside, all wait until every file is on the disk, and the
first one adds the checksums and renames. What it holds is loaded by any number of ranks, or by one process.
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

from napkin.errors import CorruptFile, NapkinError
from napkin.files import sync_file, sync_folder
from napkin.optim.shards import local
from napkin.training.checkpoint import (
    Checkpoint,
    Snapshot,
    State,
    checkpoint_path,
    load_learner,
    read_checkpoint,
    refuse_non_finite,
    set_aside,
)
from napkin.training.checkpoint_sums import checksum_of, write_state
from napkin.training.checkpoint_writer import CheckpointWriter
from napkin.training.ranks import Ranks
from napkin.training.recipe import Recipe
from napkin.training.restoring import restore_newest
from napkin.training.shard_files import shard_name, write_rows
from napkin.training.step import Learner


def restore_on_ranks(
    ranks: Ranks, folder: Path, learner: Learner, *, on_message: Callable[[str], None], **text: str
) -> Checkpoint | None:
    """`restore_newest` with ranks: the first one finds the newest that is whole, and all load that."""
    restored: list[Checkpoint | None] = []

    def restore() -> str | None:
        restored.append(restore_newest(folder, learner, on_message=on_message, **text))
        return None if restored[0] is None else restored[0].path.name

    name = ranks.from_first(restore)
    if ranks.is_first:
        return restored[0]
    if name is None:
        return None
    checkpoint = read_checkpoint(folder / name, verify=False)
    load_learner(checkpoint, learner)
    return checkpoint


def open_writer(ranks: Ranks, recipe: Recipe, folder: Path, **options: Any) -> CheckpointWriter:
    """What writes the checkpoints of a run on this rank: the first one all of them, or each one the rows that it has.

    `options` are CheckpointWriter's. Ranks write their rows together, and wait for it.
    """
    if ranks.size > 1 and recipe.training.parallelism == "fsdp":
        return _ShardWriter(ranks, folder, **options | {"background": False})
    return CheckpointWriter(folder, **options) if ranks.is_first else _Follower(folder, **options)


class _Follower(CheckpointWriter):
    """Knows of the checkpoints that the first rank writes."""

    def _write(self, taken: Snapshot, prune: bool) -> Checkpoint:
        return Checkpoint(checkpoint_path(self.folder, taken.step), msgspec.json.decode(taken.state, type=State))


class _ShardWriter(CheckpointWriter):
    """Writes this rank's rows of each."""

    def __init__(self, ranks: Ranks, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.ranks = ranks

    def _write(self, taken: Snapshot, prune: bool) -> Checkpoint:
        written = _save_sharded(self.ranks, self.folder, taken, self.before_publishing)
        if prune and self.ranks.is_first:
            self.prune(written)
        return written


def _save_sharded(ranks: Ranks, folder: Path, taken: Snapshot, before_publishing: Callable[[], None]) -> Checkpoint:
    path = checkpoint_path(folder, taken.step)
    name = ranks.from_first(lambda: _begin(path))
    if name is None:
        return read_checkpoint(path, verify=False)
    draft = folder / name
    reports = ranks.gather(_write_rows(ranks, draft, taken, path))
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

    problem = ranks.from_first(finish)
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
        here = {name: _not_empty(named) for name, named in taken.tensors.items()}
        refuse_non_finite(here, taken.step, path.parent)
        for name, named in taken.tensors.items():
            file = draft / shard_name(Path(name).stem, ranks.place.rank, ranks.size)
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


def _not_empty(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: local(tensor) for name, tensor in named.items() if local(tensor).numel()}


def _cannot_be_written(path: Path, error: Exception) -> str:
    return (
        f"'{path}' cannot be written ({error}): make room and continue with `napkin resume {path.parent.parent}`, "
        "earlier checkpoints are kept"
    )
