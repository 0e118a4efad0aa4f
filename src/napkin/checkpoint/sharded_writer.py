"""Checkpoints of several ranks: rank 0 writes all of it, or each rank its own parts of a model that is divided.

Of parts that several ranks have, such as replicas, the first of these ranks writes. A checkpoint of several writers is
published atomically too: ranks write to a hidden folder, each in a thread while training continues; when every file is
on the disk, rank 0 adds the checksums and renames the folder. It can be loaded by any number of ranks in any layout, or
by one process.
"""

import contextlib
import dataclasses
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from napkin.checkpoint.folder import checkpoint_path, read_checkpoint, refuse_full_disk, set_aside
from napkin.checkpoint.restore import load_train_state, restore_newest
from napkin.checkpoint.shard_files import Part, Parts, shard_name, write_state, write_tensors
from napkin.checkpoint.state import Checkpoint, Snapshot, State
from napkin.checkpoint.writer import CheckpointWriter, cannot_be_written, refuse_non_finite
from napkin.distributed.ranks import Ranks
from napkin.errors import CorruptFile, NapkinError
from napkin.files import sync_folder
from napkin.recipe.layout import Layout
from napkin.train_step.step import TrainState

_Digests = list[list[str]]
"""Digests of the first parts that a rank has of tensors, of the second ones, and so on: a file holds one part of
each."""


@dataclass(frozen=True)
class ShardAssignment:
    """The parts that a rank writes."""

    names: dict[str, list[tuple[str, list[str]]]]
    """For the name that a single process would give a file, and for each number of a part: the file that it goes to,
    and the tensors whose part of that number this rank writes."""

    def files(self, named: dict[str, Parts]) -> dict[str, Parts]:
        """The parts that this rank writes, by the name of the file."""
        return {
            file: {name: [named[whole][name][number]] for name in names}
            for whole, by_number in self.names.items()
            for number, (file, names) in enumerate(by_number)
            if file
        }


def assign_shards(ranks: Ranks, named: dict[str, Parts]) -> ShardAssignment:
    """Agree on the parts that each rank writes; a collective."""
    gathered = ranks.all_gather([_digests(tensors) for tensors in named.values()])
    assigned = {
        name: _assigned(tensors, Path(name).stem, [each[number] for each in gathered], ranks.info.rank)
        for number, (name, tensors) in enumerate(named.items())
    }
    return ShardAssignment(assigned)


def _assigned(tensors: Parts, stem: str, by_rank: Sequence[_Digests], rank: int) -> list[tuple[str, list[str]]]:
    taken: set[str] = set()
    total, own_files, own = 0, [], set[str]()
    for other, by_number in enumerate(by_rank):
        for digests in by_number:
            new = set(digests) - taken
            # There is a first file, even if no rank has anything to write.
            file = None if not new and total else total
            if other == rank:
                own_files.append(file)
                own |= new
            total += file is not None
        taken |= {digest for digests in by_number for digest in digests}
    return [
        (
            "" if file is None else shard_name(stem, file, total),
            [name for name, parts in tensors.items() if len(parts) > number and _digest(name, parts[number]) in own],
        )
        for number, file in enumerate(own_files)
    ]


def _digests(tensors: Parts) -> _Digests:
    most = max(map(len, tensors.values()), default=0)
    return [
        [_digest(name, parts[number]) for name, parts in tensors.items() if len(parts) > number]
        for number in range(max(1, most))
    ]


def _digest(name: str, part: Part) -> str:
    """A digest that is equal on all ranks that have this part of a tensor; short, as all ranks send all of theirs to
    all."""
    return sha256(f"{name} {part.offsets} {tuple(part.tensor.shape)}".encode()).hexdigest()[:16]


def restore_on_ranks(
    ranks: Ranks, folder: Path, train_state: TrainState, *, on_message: Callable[[str], None], **text: str
) -> Checkpoint | None:
    """`restore_newest` on several ranks: rank 0 finds the newest intact checkpoint, and all ranks load it. If its files
    do not fit on one of them, all load the one before it."""
    restored: list[Checkpoint | None] = []
    if not ranks.is_rank_zero:
        return _load_as_told(ranks, folder, train_state)

    def load(checkpoint: Checkpoint, train_state: TrainState) -> None:
        ranks.broadcast_from_zero(lambda: checkpoint.path.name)
        _load_on_all(ranks, checkpoint, train_state)

    def restore() -> None:
        restored.append(restore_newest(folder, train_state, on_message=on_message, load=load, **text))

    ranks.broadcast_from_zero(restore)
    return restored[0]


def _load_as_told(ranks: Ranks, folder: Path, train_state: TrainState) -> Checkpoint | None:
    """Load the checkpoints that rank 0 names, until it has found one that all can load."""
    checkpoint = None
    while (name := ranks.broadcast_from_zero(lambda: None)) is not None:
        # Rank 0 has verified its checksums.
        checkpoint = read_checkpoint(folder / name, verify=False)
        with contextlib.suppress(NapkinError):
            _load_on_all(ranks, checkpoint, train_state)
    return checkpoint


def _load_on_all(ranks: Ranks, checkpoint: Checkpoint, train_state: TrainState) -> None:
    """Load a checkpoint; raises on all ranks what one of them has raised."""
    error = None
    try:
        load_train_state(checkpoint, train_state)
    except NapkinError as raised:
        error = raised
    reports = ranks.all_gather(None if error is None else [str(error), isinstance(error, CorruptFile)])
    for message, is_corrupt in filter(None, reports):
        raise CorruptFile(message) if is_corrupt else NapkinError(message)


def open_writer(ranks: Ranks, layout: Layout, folder: Path, **options: Any) -> CheckpointWriter:
    """The checkpoint writer of this rank: where ranks have different parts of the state each writes its own, otherwise
    rank 0 writes.

    `options` are CheckpointWriter's; with several writers, rank 0 decides whether checkpoints are written in the
    background.
    """
    if layout.divides_state:
        return _ShardWriter(
            ranks, folder, **options | {"background": ranks.broadcast_from_zero(lambda: options["background"])}
        )
    return CheckpointWriter(folder, **options) if ranks.is_rank_zero else _ReadOnlyWriter(folder, **options)


class _ReadOnlyWriter(CheckpointWriter):
    """Writes nothing: returns the checkpoints that rank 0 writes."""

    def _write(self, taken: Snapshot, prune: bool) -> Checkpoint:
        path = checkpoint_path(self.folder, taken.step)
        return Checkpoint(path, msgspec.json.decode(taken.state, type=State), taken.frozen)


class _ShardWriter(CheckpointWriter):
    """Writes this rank's parts of each checkpoint.

    The writer threads use a separate process group, so that they can communicate while the ranks train.
    """

    def __init__(self, ranks: Ranks, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.ranks = ranks
        self._writing = ranks.separate_group()
        self._assignment: ShardAssignment | None = None

    def save(self, taken: Snapshot, *, prune: bool = True) -> None:
        """Write what this rank has been assigned; a collective."""
        super().save(self._assigned(taken), prune=prune)

    def bytes_of(self, taken: Snapshot) -> int:
        """Bytes of the files of all ranks; a collective."""
        return sum(self.ranks.all_gather(self._assigned(taken).bytes))

    def refuse_full_disk(self, taken: Snapshot) -> None:
        """Raise NapkinError on rank 0 where the disk has no space for all ranks' files; the others end silently."""
        needed = sum(self.ranks.all_gather(taken.bytes))
        self.ranks.broadcast_from_zero(lambda: refuse_full_disk(self.folder, needed))

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

    def _assigned(self, taken: Snapshot) -> Snapshot:
        """The parts of a snapshot that this rank writes."""
        if self._assignment is None:
            self._assignment = assign_shards(self.ranks, taken.files)
        return dataclasses.replace(taken, files=self._assignment.files(taken.files))


_DONE, _RUNNING, _FAILED = range(3)


def _save_sharded(ranks: Ranks, folder: Path, taken: Snapshot, before_publishing: Callable[[], None]) -> Checkpoint:
    path = checkpoint_path(folder, taken.step)
    name = ranks.broadcast_from_zero(lambda: _begin(path))
    if name is None:
        return read_checkpoint(path, verify=False)
    draft = folder / name
    reports = ranks.all_gather(_write_files(draft, taken, path))
    problems = [report["problem"] for report in reports if report["problem"]]
    sums = {name: checksum for report in reports for name, checksum in report["sums"].items()}

    def finish() -> str | None:
        try:
            if problems:
                return problems[0]
            write_state(draft, taken.state, sums, frozen=taken.frozen)
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
    """Write this rank's files. Returns their checksums, or the error message."""
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
