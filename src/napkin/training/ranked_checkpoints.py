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

from safetensors import SafetensorError
from torch import Tensor

from napkin.errors import CorruptFile, NapkinError
from napkin.files import sync_file, sync_folder
from napkin.optim.shards import local
from napkin.training.checkpoint import (
    Checkpoint,
    State,
    checksum_of,
    load_learner,
    new_state,
    read_checkpoint,
    refuse_non_finite,
    save_checkpoint,
    set_aside,
    tensors_of,
    write_state,
)
from napkin.training.ranks import Ranks
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


def save_on_ranks(ranks: Ranks, folder: Path, learner: Learner, **what: Any) -> Checkpoint:
    """`save_checkpoint` with ranks: the first one writes what all have, or each one the rows that it has."""
    if ranks.size > 1 and learner.recipe.training.parallelism == "fsdp":
        return _save_sharded(ranks, folder, learner, new_state(learner, **what))
    if ranks.is_first:
        return save_checkpoint(folder, learner, **what)
    return Checkpoint(folder / f"step-{what['step']:08d}", new_state(learner, **what))


def _save_sharded(ranks: Ranks, folder: Path, learner: Learner, state: State) -> Checkpoint:
    path = folder / f"step-{state.step:08d}"
    name = ranks.from_first(lambda: _begin(path))
    if name is None:
        return read_checkpoint(path, verify=False)
    draft = folder / name
    learner.spread.settle()
    reports = ranks.gather(_write_rows(ranks, draft, learner, path))
    problems = [report["problem"] for report in reports if report["problem"]]
    sums = {name: checksum for report in reports for name, checksum in report["sums"].items()}

    def finish() -> str | None:
        try:
            if problems:
                return problems[0]
            write_state(draft, state, sums)
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
    return Checkpoint(path, state)


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


def _write_rows(ranks: Ranks, draft: Path, learner: Learner, path: Path) -> dict[str, Any]:
    """Write this rank's files; their checksums, or what went wrong."""
    sums: dict[str, str] = {}
    try:
        tensors = tensors_of(learner)
        here = {stem: _not_empty(named) for stem, named in tensors.items()}
        refuse_non_finite(here, int(path.name.removeprefix("step-")), path.parent)
        for stem, named in tensors.items():
            file = draft / shard_name(stem, ranks.place.rank, ranks.size)
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
