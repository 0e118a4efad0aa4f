"""Which rank writes which parts of a checkpoint, and to which files: each part once, by the first rank that has it."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from napkin.checkpoint.parts import Part, Parts
from napkin.checkpoint.shard_files import shard_name
from napkin.distributed.ranks import Ranks

_Digests = list[list[str]]
"""Of the first parts that a rank has of tensors, of the second ones, and so on: a file holds one part of each."""


@dataclass(frozen=True)
class ShardAssignment:
    """What a rank writes."""

    names: dict[str, list[tuple[str, list[str]]]]
    """By the name that the file has where a single process writes: for each number of a part, the file that it goes to,
    and the tensors whose part of that number this rank writes."""

    def files(self, named: dict[str, Parts]) -> dict[str, Parts]:
        """What this rank writes of the parts that it has, by the name of the file."""
        return {
            file: {name: [named[whole][name][number]] for name in names}
            for whole, by_number in self.names.items()
            for number, (file, names) in enumerate(by_number)
            if file
        }


def assign_shards(ranks: Ranks, named: dict[str, Parts]) -> ShardAssignment:
    """Agree on what each rank writes; a collective."""
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
    """The same on all ranks that have this part of a tensor; short, as all ranks send those of all parts to all."""
    return sha256(f"{name} {part.offsets} {tuple(part.tensor.shape)}".encode()).hexdigest()[:16]
