"""The ranks of a program that are traced, and which of the others each of them stands for.

If there are few ranks, all are traced. Of many, those at different coordinates of the device meshes are: along each
dimension, the others at their first, the first coordinate, the middle, the last, those at which the sizes of shards
change, and all stages of a pipeline. Where two that follow each other differ in what they do, a coordinate between them
is traced too, until all that differ are known. Dimensions along which nothing differs are done with; of the others, all
combinations are traced, as many as the limit allows.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from napkin.planning.programs.tracing import Program, TracedRank

FEW_RANKS = 8
"""Up to this many ranks, all are traced."""


@dataclass(frozen=True)
class TracedClasses:
    """The traced ranks, and for every rank the one that stands for it."""

    traced: dict[int, TracedRank]
    stands_for: dict[int, int]
    complete: bool
    """False if the limit was reached before all combinations of coordinates that differ were traced."""


def trace_classes(program: Program, *, most_traced: int) -> TracedClasses:
    """Trace the ranks that differ, at most `most_traced` of them where there are more than a few."""
    world_size = program.world_size
    if world_size <= FEW_RANKS:
        traced = {rank: program.rank(rank) for rank in range(world_size)}
        return TracedClasses(traced, {rank: rank for rank in range(world_size)}, complete=True)
    first = program.rank(0)
    sizes, rank_at = _grid(first, world_size)
    classes: list[dict[int, int]] = []
    complete = True
    for dim, size in enumerate(sizes):
        wanted = {0, size // 2, size - 1, *_changes(first, dim, sizes)}
        if _is_pipeline(first, dim, sizes, rank_at):
            wanted = set(range(size))
        by_rank: dict[int, TracedRank] = {}

        def at(coordinate: int, dim: int = dim, by_rank: dict[int, TracedRank] = by_rank) -> TracedRank:
            place = [0] * len(sizes)
            place[dim] = coordinate
            by_rank[coordinate] = program.rank(rank_at[tuple(place)])
            return by_rank[coordinate]

        for coordinate in sorted(wanted):
            if program.n_traced >= most_traced and coordinate:
                complete = False
                break
            at(coordinate)
        pending = list(itertools.pairwise(sorted(by_rank)))
        while pending:
            low, high = pending.pop()
            if high - low < 2 or by_rank[low].figures == by_rank[high].figures:
                continue
            if program.n_traced >= most_traced:
                complete = False
                continue
            middle = (low + high) // 2
            at(middle)
            pending += [(low, middle), (middle, high)]
        classes.append(_along(size, by_rank))
    differing = [sorted(set(of.values())) for of in classes]
    for place in itertools.product(*differing):
        if program.n_traced >= most_traced:
            complete = complete and all(rank_at[each] in program.traced for each in itertools.product(*differing))
            break
        program.rank(rank_at[place])
    stands_for: dict[int, int] = {}
    for place, rank in rank_at.items():
        representative = tuple(of[coordinate] for of, coordinate in zip(classes, place, strict=True))
        stands_for[rank] = _nearest(representative, rank_at, program.traced)
    for rank in range(world_size):
        stands_for.setdefault(rank, 0)
    stands_for |= {rank: rank for rank in program.traced}
    return TracedClasses(dict(program.traced), dict(sorted(stands_for.items())), complete)


def _grid(first: TracedRank, world_size: int) -> tuple[list[int], dict[tuple[int, ...], int]]:
    """The sizes of the mesh with most dimensions that holds all ranks, and the rank at each place; without one, all
    ranks in a row."""
    whole = [places for places in first.places if all(places)]
    if not whole:
        return [world_size], {(rank,): rank for rank in range(world_size)}
    places = max(whole, key=lambda each: len(each[0]))
    sizes = [1 + max(place[dim] for place in places) for dim in range(len(places[0]))]
    return sizes, {place: rank for rank, place in enumerate(places)}


def _changes(first: TracedRank, dim: int, sizes: list[int]) -> Iterable[int]:
    """Coordinates of the grid's dimension at which the sizes of shards change."""
    for places, changes in zip(first.places, first.shards, strict=True):
        if all(places) and len(changes) == len(sizes):
            yield from changes[dim]
        elif len(changes) == 1 and len(sizes) == 1:
            yield from (each for each in changes[0] if each < sizes[0])


def _is_pipeline(first: TracedRank, dim: int, sizes: list[int], rank_at: dict[tuple[int, ...], int]) -> bool:
    along = []
    for coordinate in range(sizes[dim]):
        place = [0] * len(sizes)
        place[dim] = coordinate
        along.append(rank_at[tuple(place)])
    return any(set(along) <= set(group) and len(along) > 1 for group in first.pipelines)


def _along(size: int, found: dict[int, TracedRank]) -> dict[int, int]:
    """For each coordinate the first one that does the same: traced itself, or the nearest traced one before it."""
    same: dict[int, int] = {}
    for coordinate, rank in sorted(found.items()):
        same[coordinate] = next(each for each in sorted(found) if found[each].figures == rank.figures)
    return {each: same[max(known for known in found if known <= each)] for each in range(size)}


def _nearest(place: tuple[int, ...], rank_at: dict[tuple[int, ...], int], traced: dict[int, TracedRank]) -> int:
    """The traced rank whose place differs in the fewest dimensions."""
    if rank_at[place] in traced:
        return rank_at[place]
    places = {each: rank for each, rank in rank_at.items() if rank in traced}
    return places[min(places, key=lambda each: sum(a != b for a, b in zip(each, place, strict=True)))]


def as_ranges(ranks: Iterable[int]) -> str:
    """Ranks as short as possible.

    >>> as_ranges([0, 1, 2, 5, 8, 9])
    '0–2, 5, 8–9'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in runs)
