"""Mixing several token files in fixed proportions: which file training window n comes from, and which of its windows.

A binary tree over the sources: at each node the left side gets round(p · m) of the first m elements that reach it. That
determines for any single m whether it goes left, without the elements before it. Rounding errs by at most 1/2 per node,
and each source gets its proportion of that error. The tree is a Huffman tree (1952), in which the proportions of a
source's ancestors grow at least like the Fibonacci numbers: the total error is below
(1 + 1 + 1/2 + 1/3 + 1/5 + ...) / 2.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError

MAX_DEVIATION = 1.68
"""The most elements that a source may be ahead of or behind its proportion; 1/2 for two sources."""

_ONE = 2**40
"""Proportions are multiples of 1/_ONE: their rounding adds half an element per node after that many elements."""
_MAX_BLOCK = 2**20


class TokenMixture:
    """Memory-mapped token files of one tokenizer, and the proportion of each in training.

    `weights` are proportions of the training windows and need not sum to 1; None weights each file by its number of
    windows, so that all files end their epochs together. `later` are weights that take their place from a training
    step on, in the order of the steps (see napkin.data.mixture_phases).
    """

    files: tuple[TokenFile, ...]
    weights: tuple[float, ...] | None
    later: tuple[tuple[int, tuple[float, ...]], ...]

    def __init__(
        self,
        files: Sequence[TokenFile],
        weights: Sequence[float] | None = None,
        later: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        if not files:
            raise NapkinError("there is no token file to train on: name at least one")
        first = files[0]
        for file in files:
            if file.tokenizer_fingerprint != first.tokenizer_fingerprint:
                raise NapkinError(
                    f"'{first.path}' and '{file.path}' were made by different tokenizers: encode both with the same one"
                )
        self.files = tuple(files)
        self.weights = None if weights is None else tuple(weights)
        self.later = tuple((step, tuple(weights)) for step, weights in later)

    @property
    def n_tokens(self) -> int:
        """The number of tokens in all files."""
        return sum(file.n_tokens for file in self.files)

    def epochs(self, n_tokens: int) -> float:
        """How often the files are read when `n_tokens` are trained on; with weights, some more often than others."""
        return n_tokens / self.n_tokens

    @property
    def separator(self) -> int:
        """The token between documents."""
        return self.files[0].separator

    @property
    def sha256(self) -> str:
        """The checksum of the training data: that of a single file, or a hash of the checksums and weights of several.

        The order of the files matters; their names and locations do not.
        """
        if len(self.files) == 1:
            return self.files[0].sha256
        weights = self.weights or (None,) * len(self.files)
        lines = [f"{file.sha256} {weight}\n" for file, weight in zip(self.files, weights, strict=True)]
        lines += [f"from step {step}: {weights}\n" for step, weights in self.later]
        return sha256("".join(lines).encode()).hexdigest()


class Interleaving:
    """An endless weighted mixture of sources: a pure function of the weights, in O(number of sources) memory.

    After any n elements, each source has given its proportion of n, give or take `MAX_DEVIATION`. Raises NapkinError
    for weights that are not finite and above 0.

    >>> [places.tolist() for _, places in Interleaving([3, 1])(0, 8)]
    [[0, 1, 3, 4, 5, 7], [2, 6]]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        for weight in weights:
            if not (isfinite(weight) and weight > 0):
                raise NapkinError(f"a weight of {weight} is not possible: use a number above 0")
        if not weights:
            raise NapkinError("there are no sources to mix: name at least one")
        total = sum(weights)
        self.proportions = tuple(weight / total for weight in weights)
        self._root = _huffman(self.proportions)

    def __call__(self, start: int, length: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Assign elements `start` to `start + length` of the mixture to the sources.

        Returns for each source how many of its elements came before `start`, and the positions, from 0 to length - 1,
        of its next ones.
        """
        found: dict[int, tuple[int, list[NDArray[np.int64]]]] = {}
        for begin in range(0, max(length, 1), _MAX_BLOCK):
            places = np.arange(begin, min(begin + _MAX_BLOCK, length))
            pending: list[tuple[_Node | int, int, NDArray[np.int64]]] = [(self._root, start + begin, places)]
            while pending:
                node, before, places = pending.pop()
                if isinstance(node, int):
                    found.setdefault(node, (before, []))[1].append(places)
                    continue
                before_left, goes_left = _divide(before, len(places), node.proportion)
                pending.append((node.left, before_left, places[goes_left]))
                pending.append((node.right, before - before_left, places[~goes_left]))
        return [(found[source][0], np.concatenate(found[source][1])) for source in range(len(self.proportions))]


@dataclass(frozen=True)
class _Node:
    """A node that splits its elements; each side is another node, or the number of a source."""

    left: "_Node | int"
    right: "_Node | int"
    proportion: int
    """The proportion of the left side, times _ONE."""


def _divide(before: int, length: int, proportion: int) -> tuple[int, NDArray[np.bool_]]:
    """How many of a node's first `before` elements went left, and which of the next `length` do."""
    # The large part is in Python integers, which do not overflow; the array stays below _ONE · _MAX_BLOCK = 2^60.
    before_left, rest = divmod(before * proportion + _ONE // 2, _ONE)
    gone_left = (rest + np.arange(length + 1) * proportion) // _ONE
    return before_left, np.diff(gone_left) == 1


def _huffman(proportions: Sequence[float]) -> _Node | int:
    # The source's number breaks ties, identically on every machine.
    heap: list[tuple[float, int, _Node | int]] = [(p, number, number) for number, p in enumerate(proportions)]
    heapq.heapify(heap)
    while len(heap) > 1:
        small, number, right = heapq.heappop(heap)
        large, other, left = heapq.heappop(heap)
        proportion = round(_ONE * (large / (large + small)))
        heapq.heappush(heap, (large + small, min(number, other), _Node(left, right, proportion)))
    return heap[0][2]
