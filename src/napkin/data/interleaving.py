"""Several sources mixed in fixed shares: which one element n of an endless mixture comes from, and which of its own.

A binary tree over the sources: at each node the left side gets round(share · m) of the first m elements that come to
the node, which says for any single m whether it goes left, without those before it. Rounding errs by at most 1/2 a
node, and of a node's error a source has its part. The tree is Huffman's (1952), in which the shares of a source's
ancestors grow at least as Fibonacci's numbers: all errors together stay below (1 + 1 + 1/2 + 1/3 + 1/5 + ...) / 2.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from napkin.errors import NapkinError

FARTHEST = 1.68
"""Elements that a source may be ahead of or behind its share, at most; of two sources 1/2."""

_ONE = 2**40
"""Shares are multiples of 1/_ONE: after so many elements their rounding has come to half an element more a node."""
_LONGEST = 2**20


@dataclass(frozen=True)
class _Node:
    """Where elements part; a side is another node, or a source by its number."""

    left: "_Node | int"
    right: "_Node | int"
    share: int
    """The left side's, times _ONE."""


class Interleaving:
    """An endless mixture of sources by their weights; a pure function of the weights, in memory of their number.

    After any n elements each source has given its share of n, `FARTHEST` more or less. Raises NapkinError for weights
    that are not finite and above 0.

    >>> [places.tolist() for _, places in Interleaving([3, 1])(0, 8)]
    [[0, 1, 3, 4, 5, 7], [2, 6]]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        for weight in weights:
            if not (isfinite(weight) and weight > 0):
                raise NapkinError(f"a weight of {weight} is not possible: use a number above 0")
        if not weights:
            raise NapkinError("nothing is there to be mixed: name one source or more")
        total = sum(weights)
        self.shares = tuple(weight / total for weight in weights)
        self._root = _huffman(self.shares)

    def __call__(self, start: int, length: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Of elements `start` to `start + length` of the mixture, say for each source which are its own.

        Returns, by source, how many of its elements came before `start`, and the places, from 0 to length - 1, at
        which its next ones stand.
        """
        found: dict[int, tuple[int, list[NDArray[np.int64]]]] = {}
        for begin in range(0, max(length, 1), _LONGEST):
            places = np.arange(begin, min(begin + _LONGEST, length))
            pending: list[tuple[_Node | int, int, NDArray[np.int64]]] = [(self._root, start + begin, places)]
            while pending:
                node, before, places = pending.pop()
                if isinstance(node, int):
                    found.setdefault(node, (before, []))[1].append(places)
                    continue
                before_left, goes_left = _divide(before, len(places), node.share)
                pending.append((node.left, before_left, places[goes_left]))
                pending.append((node.right, before - before_left, places[~goes_left]))
        return [(found[source][0], np.concatenate(found[source][1])) for source in range(len(self.shares))]


def _divide(before: int, length: int, share: int) -> tuple[int, NDArray[np.bool_]]:
    """How many of a node's first `before` elements went left, and which of the next `length` do."""
    # The large part in Python's integers, which do not overflow; the array stays below _ONE · _LONGEST = 2^60.
    before_left, rest = divmod(before * share + _ONE // 2, _ONE)
    gone_left = (rest + np.arange(length + 1) * share) // _ONE
    return before_left, np.diff(gone_left) == 1


def _huffman(shares: Sequence[float]) -> _Node | int:
    # The source's number breaks ties, the same way on every machine.
    heap: list[tuple[float, int, _Node | int]] = [(share, number, number) for number, share in enumerate(shares)]
    heapq.heapify(heap)
    while len(heap) > 1:
        small, number, right = heapq.heappop(heap)
        large, other, left = heapq.heappop(heap)
        share = round(_ONE * (large / (large + small)))
        heapq.heappush(heap, (large + small, min(number, other), _Node(left, right, share)))
    return heap[0][2]
