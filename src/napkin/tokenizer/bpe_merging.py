"""Merging the bytes of one pre-token: lowest rank first; for equal ranks, from left to right.

Two algorithms with the same result: scanning all pairs for each merge is fastest for a word, but quadratic; for long
pre-tokens (a line of dashes, a megabyte of base64) the positions of each pair are tracked instead.
"""

import heapq
from collections import defaultdict
from itertools import pairwise

# Pair of ids to the id of the merged token, which is also the pair's rank: a lower one was learned earlier.
Merges = dict[tuple[int, int], int]

_LONG = 32


def apply_merges(data: bytes, merges: Merges) -> list[int]:
    """The ids of one pre-token after all applicable merges.

    >>> apply_merges(b"the", {(116, 104): 256, (256, 101): 257})
    [257]
    """
    return merge_by_scanning(data, merges) if len(data) < _LONG else merge_by_position(data, merges)


def merge_by_scanning(data: bytes, merges: Merges) -> list[int]:
    """Find the lowest rank among all pairs, merge its leftmost occurrence, repeat: O(n²), fast for short data."""
    never = 256 + len(merges)
    rank = merges.get
    ids = list(data)
    ranks = [rank(pair, never) for pair in pairwise(ids)]
    while ranks and (merged := min(ranks)) < never:
        i = ranks.index(merged)
        ids[i : i + 2] = [merged]
        del ranks[i]
        if i < len(ranks):
            ranks[i] = rank((merged, ids[i + 1]), never)
        if i:
            ranks[i - 1] = rank((ids[i - 1], merged), never)
    return ids


def merge_by_position(data: bytes, merges: Merges) -> list[int]:
    """Track the positions of every pair, and a heap of the ranks that have positions: O(n + distinct pairs · log).

    A pair gets all its positions while the later of its two ids is being created, from left to right. So each list of
    positions is in order, and complete once its rank is the lowest. A position is outdated if either of its tokens has
    been merged since: ids only grow, so the pair cannot return there.
    """
    ids = list(data)
    end = len(ids)
    following = list(range(1, end + 1))  # the position of the next token
    preceding = list(range(-1, end))
    positions: defaultdict[int, list[int]] = defaultdict(list)
    for i, pair in enumerate(pairwise(ids)):
        if pair in merges:
            positions[merges[pair]].append(i)
    pair_of = {merged: pair for pair, merged in merges.items()}
    ranks = list(positions)
    heapq.heapify(ranks)
    while ranks:
        merged = heapq.heappop(ranks)
        first, second = pair_of[merged]
        fresh: set[int] = set()
        for i in positions.pop(merged):
            j = following[i]
            if ids[i] != first or j == end or ids[j] != second:
                continue
            ids[i], ids[j] = merged, -1
            following[i] = k = following[j]
            preceding[k] = i
            if k < end and (right := merges.get((merged, ids[k]))) is not None:
                positions[right].append(i)
                fresh.add(right)
            h = preceding[i]
            if h >= 0 and (left := merges.get((ids[h], merged))) is not None:
                positions[left].append(h)
                fresh.add(left)
        for rank in fresh:
            heapq.heappush(ranks, rank)
    return [i for i in ids if i >= 0]
