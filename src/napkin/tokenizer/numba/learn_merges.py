"""Learning merges from counted words, compiled. Plain twin: `learn_merges` in bpe_training.py.

A word is a sequence of tokens. Each pair of adjacent tokens that is frequent enough has a count, a list of the words it
occurs in, and an entry in a heap whose top is the most frequent pair. Merging a pair rewrites the words of its list.
All occurrences of a pair appear while the later of its two tokens is created. So its list is complete from then on, and
its count only falls: an outdated heap entry is lowered when it reaches the top, and a list may contain words in which
the pair no longer occurs.

Pairs rarer than `THRESHOLD` are not tracked: most are rare and never merged. When no tracked pair is left, the words
are indexed again with a lower threshold.

The state is that of merge_pairs.py, which has the pairs, their heap and the bytes of tokens.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import (
    load_i64,
    load_u32,
    store_i64,
    store_u32,
)
from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba import merge_pairs as m
from napkin.tokenizer.numba.fields import State, get, put
from napkin.tokenizer.numba.merge_pairs import (
    add_token,
    append_word,
    change_pair_field,
    clear_slots,
    enter_pair,
    find_or_add_pair,
    find_pair,
    forget_pairs,
    keep_frequent_pairs,
    most_frequent,
    move_pair,
    new_pair,
    pair_field,
    pop,
    push,
    set_pair_field,
    token_length,
    token_start,
)

# What the functions return besides DONE: the buffer that is too small, or EXHAUSTED.
NEEDS_PAIRS, NEEDS_LISTS, NEEDS_OCCURRENCES, NEEDS_TOKEN_BYTES, EXHAUSTED = range(1, 6)


@CompiledFunction
def enter_pairs(state):
    """Enter all pairs into an empty hash table, which may be a larger one."""
    clear_slots(state)
    for pair in range(get(state, m.N_PAIRS)):
        enter_pair(state, pair)


@CompiledFunction
def learn(state, until):
    """Learn merges until there are `until` of them.

    Returns DONE, the buffer that is too small, or EXHAUSTED if no pair as frequent as the threshold is left. It only
    stops between two merges.
    """
    while get(state, m.N_MERGES) < until:
        pair = most_frequent(state)
        if pair < 0:
            return EXHAUSTED
        status = _has_room(state, pair)
        if status != fields.DONE:
            return status
        pop(state)
        _merge(state, pair)
    return fields.DONE


@CompiledFunction
def index_pairs(state):
    """Count the pairs of all words, and build lists and heap of those as frequent as the threshold.

    Returns DONE, or the buffer that is too small; then it must be called again.
    """
    forget_pairs(state)
    for word in range(get(state, m.N_WORDS)):
        count = load_i64(get(state, m.COUNTS) + 8 * word)
        start = get(state, m.TOKENS) + 4 * load_u32(get(state, m.STARTS) + 4 * word)
        for i in range(load_u32(get(state, m.LENGTHS) + 4 * word) - 1):
            pair = find_or_add_pair(state, load_u32(start + 4 * i), load_u32(start + 4 * i + 4))
            if pair < 0:
                return NEEDS_PAIRS
            change_pair_field(state, pair, m.COUNT, count)
            if pair_field(state, pair, m.LAST_WORD) != word:
                set_pair_field(state, pair, m.LAST_WORD, word)
                change_pair_field(state, pair, m.LIST_LENGTH, 1)
    keep_frequent_pairs(state)
    used = 0
    for pair in range(get(state, m.N_PAIRS)):
        set_pair_field(state, pair, m.LIST, used)
        used += pair_field(state, pair, m.LIST_LENGTH)
        set_pair_field(state, pair, m.LIST_LENGTH, 0)
        set_pair_field(state, pair, m.LAST_WORD, -1)
    put(state, m.LISTS_USED, used)
    if used > get(state, m.LISTS_ROOM):
        return NEEDS_LISTS
    for word in range(get(state, m.N_WORDS)):
        start = get(state, m.TOKENS) + 4 * load_u32(get(state, m.STARTS) + 4 * word)
        for i in range(load_u32(get(state, m.LENGTHS) + 4 * word) - 1):
            pair = find_pair(state, load_u32(start + 4 * i), load_u32(start + 4 * i + 4))
            if pair >= 0 and pair_field(state, pair, m.LAST_WORD) != word:
                set_pair_field(state, pair, m.LAST_WORD, word)
                append_word(state, pair, word)
    for pair in range(get(state, m.N_PAIRS)):
        push(state, pair)
    return fields.DONE


@jitted
def _has_room(state, pair):
    """DONE if the buffers have room for all that merging a pair may add, otherwise the one that is too small."""
    words, n_symbols = get(state, m.LISTS) + 4 * pair_field(state, pair, m.LIST), 0
    for i in range(pair_field(state, pair, m.LIST_LENGTH)):
        n_symbols += load_u32(get(state, m.LENGTHS) + 4 * load_u32(words + 4 * i)) + 1
    # An occurrence consists of two tokens and adds at most two pairs.
    if n_symbols > get(state, m.OCCURRENCES_ROOM):
        put(state, m.N_OCCURRENCES, n_symbols)
        return NEEDS_OCCURRENCES
    if get(state, m.LISTS_USED) + n_symbols > get(state, m.LISTS_ROOM):
        return NEEDS_LISTS
    arising = min(n_symbols, 2 * (257 + get(state, m.N_MERGES)))
    if get(state, m.N_PAIRS) + arising > get(state, m.PAIRS_ROOM):
        return NEEDS_PAIRS
    n_bytes = token_length(state, pair_field(state, pair, m.FIRST)) + token_length(
        state, pair_field(state, pair, m.SECOND)
    )
    if token_start(state, 256 + get(state, m.N_MERGES)) + n_bytes > get(state, m.TOKEN_BYTES_ROOM):
        return NEEDS_TOKEN_BYTES
    return fields.DONE


@jitted
def _merge(state, pair):
    """Replace a pair by a new token in all words that contain it."""
    first, second = pair_field(state, pair, m.FIRST), pair_field(state, pair, m.SECOND)
    number = get(state, m.N_MERGES)
    new = 256 + number
    store_i64(get(state, m.MERGES) + 16 * number, first)
    store_i64(get(state, m.MERGES) + 16 * number + 8, second)
    put(state, m.N_MERGES, number + 1)
    add_token(state, new, first, second)
    base = get(state, m.N_PAIRS)
    put(state, m.N_OCCURRENCES, 0)
    words = get(state, m.LISTS) + 4 * pair_field(state, pair, m.LIST)
    for i in range(pair_field(state, pair, m.LIST_LENGTH)):
        _rewrite(state, load_u32(words + 4 * i), first, second, new)
    set_pair_field(state, pair, m.COUNT, 0)
    _lower_replaced_pairs(state, base, first, second, new)
    _keep_frequent_new_pairs(state, base)


@jitted
def _rewrite(state, word, first, second, new):
    symbols = get(state, m.TOKENS) + 4 * load_u32(get(state, m.STARTS) + 4 * word)
    length = load_u32(get(state, m.LENGTHS) + 4 * word)
    count = load_i64(get(state, m.COUNTS) + 8 * word)
    i, kept = 0, 0
    while i < length:
        symbol = load_u32(symbols + 4 * i)
        following = load_u32(symbols + 4 * i + 4) if i + 1 < length else -1
        if symbol != first or following != second:
            # The token before this one has just been created.
            if kept and load_u32(symbols + 4 * kept - 4) == new:
                _add_occurrence(state, get(state, m.AFTER) + 4 * symbol, new, symbol, word, count)
            store_u32(symbols + 4 * kept, symbol)
            i += 1
        else:
            if kept:
                before = load_u32(symbols + 4 * kept - 4)
                _add_occurrence(state, get(state, m.BEFORE) + 4 * before, before, new, word, count)
            store_u32(symbols + 4 * kept, new)
            i += 2
        kept += 1
    store_u32(get(state, m.LENGTHS) + 4 * word, kept)


@jitted
def _add_occurrence(state, number, first, second, word, count):
    """Record an occurrence of a pair with the new token; its number, or NONE, is at the address `number`."""
    pair = load_u32(number)
    if pair == m.NONE:
        pair = new_pair(state, first, second)
        store_u32(number, pair)
    change_pair_field(state, pair, m.COUNT, count)
    if pair_field(state, pair, m.LAST_WORD) != word:
        set_pair_field(state, pair, m.LAST_WORD, word)
        change_pair_field(state, pair, m.LIST_LENGTH, 1)
        note = get(state, m.OCCURRENCES) + 8 * get(state, m.N_OCCURRENCES)
        store_u32(note, pair)
        store_u32(note + 4, word)
        put(state, m.N_OCCURRENCES, get(state, m.N_OCCURRENCES) + 1)


@jitted
def _lower_replaced_pairs(state, base, first, second, new):
    """Lower the counts of the pairs that pairs with the new token have replaced."""
    for pair in range(base, get(state, m.N_PAIRS)):
        before, after = pair_field(state, pair, m.FIRST), pair_field(state, pair, m.SECOND)
        if after == new:
            store_u32(get(state, m.BEFORE) + 4 * before, m.NONE)
        else:
            store_u32(get(state, m.AFTER) + 4 * after, m.NONE)
        gone_first = second if before == new else before
        gone_second = first if after == new else after
        if gone_first == first and gone_second == second:
            continue
        gone = find_pair(state, gone_first, gone_second)
        if gone >= 0:
            change_pair_field(state, gone, m.COUNT, -pair_field(state, pair, m.COUNT))


@jitted
def _keep_frequent_new_pairs(state, base):
    """Give the frequent ones of the pairs from `base` on a list and a heap entry, and drop the others."""
    n_pairs, used, threshold = base, get(state, m.LISTS_USED), get(state, m.THRESHOLD)
    for pair in range(base, get(state, m.N_PAIRS)):
        new_number = m.NONE
        if pair_field(state, pair, m.COUNT) >= threshold:
            new_number = n_pairs
            move_pair(state, pair, n_pairs)
            set_pair_field(state, n_pairs, m.LIST, used)
            used += pair_field(state, n_pairs, m.LIST_LENGTH)
            set_pair_field(state, n_pairs, m.LIST_LENGTH, 0)
            n_pairs += 1
        store_u32(get(state, m.NEW_NUMBERS) + 4 * (pair - base), new_number)
    put(state, m.N_PAIRS, n_pairs)
    put(state, m.LISTS_USED, used)
    for i in range(get(state, m.N_OCCURRENCES)):
        note = get(state, m.OCCURRENCES) + 8 * i
        pair = load_u32(get(state, m.NEW_NUMBERS) + 4 * (load_u32(note) - base))
        if pair != m.NONE:
            append_word(state, pair, load_u32(note + 4))
    for pair in range(base, n_pairs):
        enter_pair(state, pair)
        push(state, pair)


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
    while done < n_merges and (reached := learner.learn(min(done + merges_per_report, n_merges))) != done:
        done = reached
        if done % merges_per_report == 0:
            progress("merging", done, n_merges)
    progress("merging", done, done)
    return [(first, second) for first, second in learner.array(m.MERGES)[:done].tolist()]


class _Learner(State):
    """The state of `learn` with its arrays."""

    def __init__(
        self,
        symbols: NDArray[np.uint32],
        starts: NDArray[np.uint32],
        counts: NDArray[np.int64],
        n_merges: int,
        threshold: int | None,
    ) -> None:
        super().__init__(m.N_FIELDS, m.HASH_KEY)
        lengths, vocab_size = np.diff(starts), 256 + n_merges
        token_starts = np.zeros(vocab_size + 1, np.int64)
        token_starts[:257] = np.arange(257)
        prefixes = np.zeros(vocab_size, np.uint64)
        prefixes[:256] = np.arange(256, dtype=np.uint64) << np.uint64(56)
        self.point(m.TOKENS, symbols)
        self.point(m.STARTS, starts)
        self.point(m.LENGTHS, lengths)
        self.point(m.COUNTS, counts, m.N_WORDS)
        self.point(m.MERGES, np.empty((n_merges, 2), np.int64))
        self.point(m.TOKEN_STARTS, token_starts)
        self.point(m.TOKEN_PREFIXES, prefixes)
        self.point(m.TOKEN_BYTES, np.arange(max(256, 8 * vocab_size)).astype(np.uint8), m.TOKEN_BYTES_ROOM)
        self.point(m.BEFORE, np.full(vocab_size, m.NONE, np.uint32))
        self.point(m.AFTER, np.full(vocab_size, m.NONE, np.uint32))
        self.point(m.NEW_NUMBERS, np.empty(2 * vocab_size + 1, np.uint32))
        self.point(m.OCCURRENCES, np.empty((2**12, 2), np.uint32), m.OCCURRENCES_ROOM)
        self.point(m.LISTS, np.empty(len(symbols), np.uint32), m.LISTS_ROOM)
        self.point(m.PAIRS, np.empty((0, 6), np.int64))
        self.point(m.HEAP, np.empty((0, 2), np.int64))
        self._allocate_pairs(2**16)
        if threshold is None:
            n_occurrences = int((counts * (lengths - np.uint32(1))).sum()) if len(counts) else 0
            threshold = n_occurrences // (128 * max(n_merges, 1))
        self.state[m.THRESHOLD] = max(threshold, 1)
        self._index()

    def learn(self, until: int) -> int:
        """Learn merges until there are `until` of them, or no pair is left; returns how many there are."""
        state = self.state
        while (status := learn(self.address, until)) != fields.DONE:
            if status != EXHAUSTED:
                self._make_room(status)
            elif state[m.THRESHOLD] == 1:
                break
            else:
                state[m.THRESHOLD] = max(1, int(state[m.THRESHOLD]) // 16)
                self._index()
        return int(state[m.N_MERGES])

    def _index(self) -> None:
        while (status := index_pairs(self.address)) != fields.DONE:
            self._make_room(status)

    def _make_room(self, status: int) -> None:
        if status == NEEDS_PAIRS:
            self._allocate_pairs(2 * int(self.state[m.PAIRS_ROOM]))
            return
        field, room, wanted = {
            NEEDS_LISTS: (m.LISTS, m.LISTS_ROOM, int(self.state[m.LISTS_USED])),
            NEEDS_OCCURRENCES: (m.OCCURRENCES, m.OCCURRENCES_ROOM, int(self.state[m.N_OCCURRENCES])),
            NEEDS_TOKEN_BYTES: (m.TOKEN_BYTES, m.TOKEN_BYTES_ROOM, 0),
        }[status]
        self._enlarge(field, max(2 * len(self.array(field)), wanted), room)

    def _allocate_pairs(self, room: int) -> None:
        self._enlarge(m.PAIRS, room, m.PAIRS_ROOM)
        self._enlarge(m.HEAP, room)
        self.point(m.PAIR_SLOTS, np.empty(4 * room, np.uint32), m.N_PAIR_SLOTS)
        enter_pairs(self.address)

    def _enlarge(self, field: int, size: int, room: int | None = None) -> None:
        old = self.array(field)
        new = np.empty((size, *old.shape[1:]), old.dtype)
        new[: len(old)] = old
        self.point(field, new, room)
