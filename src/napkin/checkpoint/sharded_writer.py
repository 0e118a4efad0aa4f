"""Checkpoints of several ranks: rank 0 writes all of it, or each rank its own parts of a model that is divided.

Of parts that several ranks have, such as replicas, the first of these ranks writes. A checkpoint of several writers is
published atomically too: ranks write to a hidden folder, each in a thread while training continues; when every file is
on the disk, rank 0 adds the checksums and renames the folder. It can be loaded by any number of ranks in any layout, or
by one process.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from napkin.checkpoint.folder import checkpoint_path, read_checkpoint, refuse_full_disk
from napkin.checkpoint.restore import load_train_state, restore_newest
from napkin.checkpoint.shard_files import shard_name
from napkin.checkpoint.state import Checkpoint, Snapshot, State
from napkin.checkpoint.writer import CheckpointWriter, write_checkpoint
from napkin.distributed.ranks import Ranks
from napkin.errors import CorruptFile, NapkinError
from napkin.optim.tensor_parts import Part, Parts
from napkin.recipe.layout import Layout
from napkin.train_step.step import TrainState

_Digests = list[list[str]]
"""Digests of the first parts that a rank has of tensors, of the second ones, and so on: a file holds one part of
each."""


Assignment = dict[str, tuple[str, int, list[str]]]
"""For each file that a rank writes, by name: the name that a single process would give it, a part number, and the
tensors whose part of that number it holds."""


def assign_shards(ranks: Ranks, named: dict[str, Parts]) -> Assignment:
    """Agree on the parts that each rank writes, and return this rank's; a collective."""
    gathered = ranks.all_gather([_digests(tensors) for tensors in named.values()])
    assigned: Assignment = {}
    for place, (whole, tensors) in enumerate(named.items()):
        taken: set[str] = set()
        total, own_files, own = 0, [], set[str]()
        for rank, by_name in enumerate(gathered):
            for digests in by_name[place]:
                new = set(digests) - taken
                # There is a first file, even if no rank has anything to write.
                file = None if not new and total else total
                if rank == ranks.info.rank:
                    own_files.append(file)
                    own |= new
                total += file is not None
            taken |= {digest for digests in by_name[place] for digest in digests}
        for number, file in enumerate(own_files):
            if file is not None:
                names = [
                    name
                    for name, parts in tensors.items()
                    if len(parts) > number and _digest(name, parts[number]) in own
                ]
                assigned[shard_name(Path(whole).stem, file, total)] = whole, number, names
    return assigned


def assigned_parts(assigned: Assignment, named: dict[str, Parts]) -> dict[str, Parts]:
    """The parts that a rank writes, by the name of the file."""
    return {
        file: {name: [named[whole][name][number]] for name in names}
        for file, (whole, number, names) in assigned.items()
    }


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
    """Load a checkpoint; an error on one rank is raised on all."""
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
        self._assignment: Assignment | None = None

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
        written = write_checkpoint(self.folder, taken, before_publishing=self.before_publishing, ranks=self._writing)
        if prune and self.ranks.is_rank_zero:
            self.prune(written)
        return written

    def _assigned(self, taken: Snapshot) -> Snapshot:
        """The parts of a snapshot that this rank writes."""
        if self._assignment is None:
            self._assignment = assign_shards(self.ranks, taken.files)
        return dataclasses.replace(taken, files=assigned_parts(self._assignment, taken.files))


_DONE, _RUNNING, _FAILED = range(3)
