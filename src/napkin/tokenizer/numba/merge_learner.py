"""Learning merges with the compiled core, in one thread.

Merges depend on the counts of pre-tokens alone.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.numba import fields, learn_merges, pair_table
from napkin.tokenizer.numba.hash_keys import set_hash_keys


def learn_merges_compiled(
    words: tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64]],
    n_merges: int,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    *,
    merges_per_report: int = 256,
    threshold: int | None = None,
) -> list[tuple[int, int]]:
    """The first `n_merges` merges for words from `PreTokenCounter.words`, fewer if no pair is left.

    Pairs rarer than `threshold` are not tracked until no other pair is left. The default is a conservative estimate of
    the count of the last merge; it affects speed only. Plain twin: `learn_merges`.
    """
    learner = _Learner(*words, n_merges, threshold)
    done = 0
    while done < n_merges:
        reached = learner.learn(min(done + merges_per_report, n_merges))
        if reached == done:
            break
        done = reached
        if done % merges_per_report == 0:
            progress("merging", done, n_merges)
    progress("merging", done, done)
    return [(first, second) for first, second in learner.merges[:done].tolist()]


class _Learner:
    """The state of learn_merges.py with its arrays."""

    def __init__(
        self,
        symbols: NDArray[np.uint32],
        starts: NDArray[np.uint32],
        counts: NDArray[np.int64],
        n_merges: int,
        threshold: int | None,
    ) -> None:
        self.state = np.zeros(pair_table.N_FIELDS, np.int64)
        self.address = self.state.ctypes.data
        set_hash_keys(self.state, pair_table.HASH_KEY, pair_table.HASH_MULTIPLIER)
        self._arrays: dict[int, NDArray] = {}
        lengths = np.diff(starts)
        self._point(pair_table.TOKENS, symbols)
        self._point(pair_table.STARTS, starts)
        self._point(pair_table.LENGTHS, lengths)
        self._point(pair_table.COUNTS, counts)
        self.state[pair_table.N_WORDS] = len(counts)
        vocab_size = 256 + n_merges
        self.merges = np.empty((n_merges, 2), np.int64)
        self._point(pair_table.MERGES, self.merges)
        token_starts = np.zeros(vocab_size + 1, np.int64)
        token_starts[:257] = np.arange(257)
        prefixes = np.zeros(vocab_size, np.uint64)
        prefixes[:256] = np.arange(256, dtype=np.uint64) << np.uint64(56)
        self._point(pair_table.TOKEN_STARTS, token_starts)
        self._point(pair_table.TOKEN_PREFIXES, prefixes)
        token_bytes = np.arange(max(256, 8 * vocab_size)).astype(np.uint8)
        self._set_buffer(pair_table.TOKEN_BYTES, pair_table.TOKEN_BYTES_ROOM, token_bytes)
        for field in (pair_table.BEFORE, pair_table.AFTER):
            self._point(field, np.full(vocab_size, pair_table.NONE, np.uint32))
        self._point(pair_table.NEW_NUMBERS, np.empty(2 * vocab_size + 1, np.uint32))
        self._set_buffer(pair_table.OCCURRENCES, pair_table.OCCURRENCES_ROOM, np.empty((2**12, 2), np.uint32))
        self._set_buffer(pair_table.LISTS, pair_table.LISTS_ROOM, np.empty(len(symbols), np.uint32))
        self._allocate_pairs(2**16)
        if threshold is None:
            n_occurrences = int((counts * (lengths - np.uint32(1))).sum()) if len(counts) else 0
            threshold = n_occurrences // (128 * max(n_merges, 1))
        self.state[pair_table.THRESHOLD] = max(threshold, 1)
        self._index()

    def learn(self, until: int) -> int:
        """Learn merges until there are `until` of them, or no pair is left; returns how many there are."""
        state = self.state
        while (status := learn_merges.learn(self.address, until)) != fields.DONE:
            if status != learn_merges.EXHAUSTED:
                self._make_room(status)
            elif state[pair_table.THRESHOLD] == 1:
                break
            else:
                state[pair_table.THRESHOLD] = max(1, int(state[pair_table.THRESHOLD]) // 16)
                self._index()
        return int(state[pair_table.N_MERGES])

    def _index(self) -> None:
        while (status := learn_merges.index_pairs(self.address)) != fields.DONE:
            self._make_room(status)

    def _make_room(self, status: int) -> None:
        state = self.state
        if status == learn_merges.NEEDS_PAIRS:
            self._allocate_pairs(2 * int(state[pair_table.PAIRS_ROOM]))
            return
        field, room = {
            learn_merges.NEEDS_LISTS: (pair_table.LISTS, pair_table.LISTS_ROOM),
            learn_merges.NEEDS_OCCURRENCES: (pair_table.OCCURRENCES, pair_table.OCCURRENCES_ROOM),
            learn_merges.NEEDS_TOKEN_BYTES: (pair_table.TOKEN_BYTES, pair_table.TOKEN_BYTES_ROOM),
        }[status]
        old = self._arrays[field]
        sizes = {pair_table.OCCURRENCES: pair_table.N_OCCURRENCES, pair_table.LISTS: pair_table.LISTS_USED}
        wanted = state[sizes[field]] if field in sizes else 0
        new = np.empty((max(2 * len(old), int(wanted)), *old.shape[1:]), old.dtype)
        new[: len(old)] = old
        self._set_buffer(field, room, new)

    def _allocate_pairs(self, room: int) -> None:
        fields, heap = np.empty((room, 6), np.int64), np.empty((room, 2), np.int64)
        n_slots = 4 * room
        if pair_table.PAIRS in self._arrays:
            fields[: self.state[pair_table.N_PAIRS]] = self._arrays[pair_table.PAIRS][: self.state[pair_table.N_PAIRS]]
            heap[: self.state[pair_table.N_HEAP]] = self._arrays[pair_table.HEAP][: self.state[pair_table.N_HEAP]]
        self._point(pair_table.PAIRS, fields)
        self._point(pair_table.HEAP, heap)
        self._point(pair_table.PAIR_SLOTS, np.empty(n_slots, np.uint32))
        self.state[pair_table.PAIRS_ROOM] = room
        self.state[pair_table.N_PAIR_SLOTS] = n_slots
        pair_table.enter_pairs(self.address)

    def _set_buffer(self, field: int, room: int, array: NDArray) -> None:
        self._point(field, array)
        self.state[room] = len(array)

    def _point(self, field: int, array: NDArray) -> None:
        self._arrays[field] = array
        self.state[field] = array.ctypes.data
