"""Which document of a cluster stays.

Documents of earlier runs (an index) stay before those of this one: they may have been published. Of the rest it is the
longest, of equally long ones that with the smallest identity, whatever the order of shards; or the first that was read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from napkin.curation.deduplication.clusters import Numbers, numbers_array
from napkin.curation.deduplication.key_file import KeyFile
from napkin.curation.deduplication.marks import Marks

Keep = Literal["longest", "first"]

_STEP = 2**16
# Of a cluster, in the dictionary that finds its best.
_CLUSTER_BYTES = 512


@dataclass
class KeptDocuments:
    """For each cluster of two documents or more, given by its root, the number of the one that stays."""

    roots: Numbers
    kept: Numbers

    def dropped(self, first: int, members: Numbers) -> Iterator[tuple[int, int]]:
        """(document, the one that stays in its place) of documents from `first` on, whose roots are `members`."""
        if not len(self.roots):
            return
        at = np.minimum(np.searchsorted(self.roots, members), len(self.roots) - 1)
        kept = np.where(self.roots[at] == members, self.kept[at], np.arange(first, first + len(members)))
        for place in np.flatnonzero(kept != np.arange(first, first + len(members))).tolist():
            yield first + place, int(kept[place])


def choose_kept(
    files: Sequence[KeyFile], generations: Sequence[int], roots: Numbers, keep: Keep, scratch: Path, memory: int
) -> KeptDocuments:
    """Choose from each cluster.

    Args:
        files: whose documents are numbered one after another.
        generations: of each file; the documents of a smaller one stay before those of a larger.
        roots: of the cluster of each document.
        keep: the rule within a generation.
        scratch: a folder for what does not fit into memory.
        memory: bytes; where clusters need more, the files are read several times.
    """
    count = _count_of_clusters(roots, Marks(len(roots), scratch / "counted", memory // 8))
    many = numbers_array(count, scratch / "clusters", memory // 4)
    _fill_with_clusters(many, roots, Marks(len(roots), scratch / "filled", memory // 8))
    kept = numbers_array(len(many), scratch / "kept", memory // 4)
    at_a_time = max(memory // 4 // _CLUSTER_BYTES, 1)
    for first in range(0, len(many), at_a_time):
        chosen = many[first : first + at_a_time]
        best = _best_of(files, generations, roots, chosen, keep)
        kept[first : first + at_a_time] = [best[root][-1] for root in chosen.tolist()]
    return KeptDocuments(many, kept)


def _count_of_clusters(roots: Numbers, seen: Marks) -> int:
    return sum(len(each) for each in _roots_of_others(roots, seen))


def _fill_with_clusters(many: Numbers, roots: Numbers, seen: Marks) -> None:
    """Fill in the roots of all clusters with another member, in ascending order."""
    filled = 0
    for found in _roots_of_others(roots, seen):
        many[filled : filled + len(found)] = found
        filled += len(found)
    many.sort()


def _roots_of_others(roots: Numbers, seen: Marks) -> Iterator[Numbers]:
    """The roots that some other number has, each once."""
    for start in range(0, len(roots), _STEP):
        piece = roots[start : start + _STEP]
        found = np.unique(piece[piece != np.arange(start, start + len(piece))])
        fresh = found[~seen.at(found)]
        seen.set(fresh)
        yield fresh


def _best_of(
    files: Sequence[KeyFile], generations: Sequence[int], roots: Numbers, chosen: Numbers, keep: Keep
) -> dict[int, tuple]:
    """For each of the chosen roots what is smallest of its members; the number of the document comes last."""
    best: dict[int, tuple] = {}
    number = 0
    for file, generation in zip(files, generations, strict=True):
        for chunk in range(len(file.starts) - 1):
            n = int(file.starts[chunk + 1] - file.starts[chunk])
            members = roots[number : number + n]
            at = np.minimum(np.searchsorted(chosen, members), len(chosen) - 1)
            places = np.flatnonzero(chosen[at] == members)
            lengths = file.values(chunk)[places].tolist() if keep == "longest" else [0] * len(places)
            names = file.identities(chunk, places.tolist()) if keep == "longest" else [""] * len(places)
            for place, root, length, name in zip(
                places.tolist(), members[places].tolist(), lengths, names, strict=True
            ):
                found = (generation, -length, name, number + place)
                if root not in best or found < best[root]:
                    best[root] = found
            number += n
    return best
