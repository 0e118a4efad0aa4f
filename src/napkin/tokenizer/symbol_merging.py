"""Merging symbols by the rank of their pairs: lowest rank first; for equal ranks, from left to right.

A pair may have a lower rank than the pairs that make its parts, and several pairs may make the same symbol. Two
algorithms with the same result: scanning all pairs for each merge is fastest for a word, but quadratic; long pieces (a
line of dashes, a megabyte of base64) take a heap of pairs.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

Ranks = Mapping[tuple[int, int], int]
"""Pair of ids to its rank, from 0 on."""

_LONG = 48


def merge_symbols(ids: list[int], ranks: Ranks, made: Sequence[int]) -> list[int]:
    """The ids after all applicable merges; the pair of rank r becomes `made[r]`. `ids` may be changed.

    >>> merge_symbols([0, 0, 1], {(2, 1): 0, (0, 0): 1}, [3, 2])
    [3]
    """
    return merge_by_scanning(ids, ranks, made) if len(ids) < _LONG else merge_by_heap(ids, ranks, made)


def merge_by_scanning(ids: list[int], ranks: Ranks, made: Sequence[int]) -> list[int]:
    """Find the lowest rank among all pairs, merge its leftmost occurrence, repeat: O(n²)."""
    never, rank_of = len(made), ranks.get
    found = [rank_of(pair, never) for pair in pairwise(ids)]
    while found and (rank := min(found)) < never:
        i = found.index(rank)
        merged = made[rank]
        ids[i : i + 2] = [merged]
        del found[i]
        if i < len(found):
            found[i] = rank_of((merged, ids[i + 1]), never)
        if i:
            found[i - 1] = rank_of((ids[i - 1], merged), never)
    return ids


def merge_by_heap(ids: list[int], ranks: Ranks, made: Sequence[int]) -> list[int]:
    """Take pairs from a heap, by rank and place; one that has changed since it was put there is skipped: O(n log n)."""
    end = len(ids)
    following = list(range(1, end + 1))  # the place of the next symbol
    preceding = list(range(-1, end))
    heap = [(rank, i) for i, pair in enumerate(pairwise(ids)) if (rank := ranks.get(pair)) is not None]
    heapq.heapify(heap)
    while heap:
        rank, i = heapq.heappop(heap)
        j = following[i]
        # A symbol that was merged into the one before it has the id -1, which no pair contains.
        if j == end or ranks.get((ids[i], ids[j])) != rank:
            continue
        ids[i], ids[j] = made[rank], -1
        k = following[i] = following[j]
        preceding[k] = i
        if k < end and (right := ranks.get((ids[i], ids[k]))) is not None:
            heapq.heappush(heap, (right, i))
        h = preceding[i]
        if h >= 0 and (left := ranks.get((ids[h], ids[i]))) is not None:
            heapq.heappush(heap, (left, h))
    return [i for i in ids if i >= 0]
