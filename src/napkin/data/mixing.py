"""Mixing several token files in fixed proportions: which file training window n comes from, and which of its windows.

A binary tree over the sources: at each node the left side gets round(p · m) of the first m elements that reach it. So
for any single element it is known whether it goes left, without looking at the elements before it. Rounding errs by at
most 1/2 per node, and each source gets its proportion of that error. The tree is a Huffman tree (1952), in which the
proportions of a source's ancestors grow at least like the Fibonacci numbers: the total error is below (1 + 1 + 1/2 +
1/3 + 1/5 + ...) / 2.

Proportions of a mixture, and their changes during training: files are weighted by their lengths with a temperature
(Devlin et al. 2018, multilingual BERT: exponentially smoothed weighting), no file is read more often than a number of
epochs (as in UniMax, Chung et al. 2023), and the proportions may change at steps (a curriculum).

This file also detects that a memory-mapped token file was modified in place while a run reads it.
"""

import heapq
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import fsum, isfinite

import numpy as np
from numpy.typing import NDArray

from napkin.data.token_file import TokenFile
from napkin.errors import CorruptFile, NapkinError

MAX_DEVIATION = 1.68
"""The most elements that a source may be ahead of or behind its proportion; 1/2 for two sources."""

_ONE = 2**40
"""Proportions are multiples of 1/_ONE: their rounding adds half an element per node after that many elements."""
_MAX_BLOCK = 2**20


class TokenMixture:
    """Memory-mapped token files of one tokenizer, and the proportion of each in training.

    `weights` are proportions of the training windows and need not sum to 1; None weights each file by its number of
    windows, so that all files end their epochs together. `later` are weights that take their place from a training
    step on, in the order of the steps (see napkin.data.mixing).
    """

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
        return sum(file.n_tokens for file in self.files)

    def epochs(self, n_tokens: int) -> float:
        """Passes over the files when `n_tokens` are trained on; with weights, some are read more often than others."""
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
    """Proportion of the left side, as an integer: times _ONE."""


def _divide(before: int, length: int, proportion: int) -> tuple[int, NDArray[np.bool_]]:
    """The number of a node's first `before` elements that went left, and which of the next `length` do."""
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


def temperature_weights(lengths: Sequence[int], temperature: float) -> tuple[float, ...]:
    """Weights in proportion to lengths^(1/temperature): 1 is proportional, infinity the same for all.

    Raises NapkinError for a temperature that is not above 0.

    >>> [round(weight, 3) for weight in temperature_weights([100, 1], 2.0)]
    [0.909, 0.091]
    """
    if not temperature > 0:
        raise NapkinError(f"a temperature of {temperature} is not possible: use a number above 0")
    # Relative to the largest, no power overflows.
    powers = [(length / max(lengths)) ** (1 / temperature) for length in lengths]
    return tuple(power / fsum(powers) for power in powers)


def shares_within(weights: Sequence[float], amount: float, capacities: Sequence[float]) -> tuple[float, ...] | None:
    """Divide `amount` in proportion to `weights`, no part above its capacity; what is left over goes to the others in
    proportion to their weights. None where the capacities of those with a weight are less than `amount`.

    >>> shares_within([1, 1, 2], 80, [10, 100, 100])
    (10.0, 23.333333333333332, 46.666666666666664)
    """
    shares = [0.0] * len(weights)
    free = {number for number, weight in enumerate(weights) if weight > 0}
    rest = float(amount)
    while free:
        total = fsum(weights[number] for number in free)
        full = {number for number in free if rest * weights[number] / total > capacities[number]}
        if not full:
            for number in free:
                shares[number] = rest * weights[number] / total
            return tuple(shares)
        for number in full:
            shares[number] = float(capacities[number])
        rest -= fsum(capacities[number] for number in full)
        free -= full
    return tuple(shares) if rest <= 1e-9 * amount else None


class PhasedInterleaving:
    """Interleavings one after another: each phase goes on where a source was left, a pure function of its weights.

    `phases` are the first element of each phase, which start with 0 and increase, and the weights from there on; a
    source of weight 0 gives nothing. It is called as `Interleaving` is. Raises NapkinError for weights that are
    negative, not finite, or all 0.

    >>> interleaving = PhasedInterleaving([(0, [1, 0]), (3, [1, 1])])
    >>> [places.tolist() for _, places in interleaving(0, 7)]
    [[0, 1, 2, 4, 6], [3, 5]]
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        self._starts = [start for start, _ in phases]
        if self._starts[:1] != [0] or sorted(set(self._starts)) != self._starts:
            raise NapkinError(f"phases that start at {self._starts} are not possible: start with 0, and increase")
        self._phases = [_Phase(weights) for _, weights in phases]
        self.proportions = [phase.proportions for phase in self._phases]
        n_sources = len(phases[0][1])
        self._before = [[0] * n_sources]
        for number, (start, end) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            given = self._phases[number].given(end - start)
            self._before.append([sum(both) for both in zip(self._before[-1], given, strict=True)])

    def __call__(self, start: int, length: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Assign elements `start` to `start + length` to the sources: for each how many of its elements came before,
        and the positions of its next ones."""
        found: list[tuple[int, list[NDArray[np.int64]]]] = []
        first = begin = start
        while begin < start + length or not found:
            number = bisect_right(self._starts, begin) - 1
            ends = [*self._starts[number + 1 : number + 2], start + length]
            end = min(start + length, *ends)
            assigned = self._phases[number](begin - self._starts[number], end - begin)
            if not found:
                found = [(before + more, []) for before, (more, _) in zip(self._before[number], assigned, strict=True)]
            for (_, parts), (_, places) in zip(found, assigned, strict=True):
                parts.append(places + (begin - first))
            if end == begin:
                break
            begin = end
        return [(before, np.concatenate(parts)) for before, parts in found]


class _Phase:
    """An interleaving of the sources whose weight is not 0; the others give nothing."""

    def __init__(self, weights: Sequence[float]) -> None:
        wrong = next((weight for weight in weights if not (isfinite(weight) and weight >= 0)), None)
        if wrong is not None or not any(weights):
            raise NapkinError(f"weights of {list(weights)} are not possible: use numbers from 0, not all of them 0")
        self._sources = [number for number, weight in enumerate(weights) if weight > 0]
        self._interleaving = Interleaving([weights[number] for number in self._sources])
        self._n = len(weights)
        shares = dict(zip(self._sources, self._interleaving.proportions, strict=True))
        self.proportions = tuple(shares.get(number, 0.0) for number in range(self._n))

    def __call__(self, start: int, length: int) -> list[tuple[int, NDArray[np.int64]]]:
        assigned = dict(zip(self._sources, self._interleaving(start, length), strict=True))
        return [assigned.get(number, (0, np.empty(0, np.int64))) for number in range(self._n)]

    def given(self, length: int) -> list[int]:
        return [before for before, _ in self(length, 0)]


class TokenGuard:
    """Remembers the state of token files on disk when they were verified.

    Replacing or removing a file is harmless: the mapping keeps the old one alive.
    """

    def __init__(self, tokens: TokenFile | TokenMixture) -> None:
        self.files = tokens.files if isinstance(tokens, TokenMixture) else (tokens,)
        self._before = {file: _stat(file) for file in self.files}

    def verify_unchanged(self) -> None:
        """Raise CorruptFile if a mapped file no longer contains the tokens that were verified.

        A file with another date is verified again: of one that is verified as it is read, the blocks read so far.
        """
        for file, before in self._before.items():
            now = _stat(file)
            if now is None or before is None or now[:2] != before[:2] or now == before:
                continue
            size_bytes, before_bytes = now[2], before[2]
            # Reading a mapped page beyond the end of the file would kill the process.
            if size_bytes < before_bytes:
                raise CorruptFile(
                    f"'{file.path}' has shrunk from {before_bytes} to {size_bytes} bytes while the run reads it: "
                    "restore it and continue with `napkin resume`; earlier checkpoints are kept"
                )
            file.verify_again()
            self._before[file] = now


def _stat(file: TokenFile) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(file.path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
