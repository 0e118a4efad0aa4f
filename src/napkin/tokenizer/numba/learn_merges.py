"""Learning merges from counted words, compiled. Plain twin: `learn_merges` in bpe_training.py.

A word is a sequence of tokens. Each pair of adjacent tokens that is frequent enough has a count, a list of the words it
occurs in, and an entry in a heap whose top is the most frequent pair. Merging a pair rewrites the words of its list.
All occurrences of a pair appear while the later of its two tokens is created. So its list is complete from then on, and
its count only falls: an outdated heap entry is lowered when it reaches the top, and a list may contain words in which
the pair no longer occurs.

Pairs rarer than THRESHOLD are not tracked: most are rare and never merged. When no tracked pair is left, the words are
indexed again with a lower threshold.

The state is an int64 array as in fields.py, with fields of its own.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import (
    folded_product,
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    store_i64,
    store_u8,
    store_u32,
)
from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba.fields import State, get, put

# Words: their tokens (uint32); of each word its start, its number of tokens (uint32) and its count (int64).
N_WORDS, TOKENS, STARTS, LENGTHS, COUNTS = range(5)
# The merges (int64 of shape [n, 2]) and how many there are; merge i makes token 256 + i.
MERGES, N_MERGES = 5, 6
# The bytes of the tokens; the start of each and the end of the last (int64); the first 8 bytes of each as a big-endian
# number (uint64).
TOKEN_BYTES, TOKEN_BYTES_ROOM, TOKEN_STARTS, TOKEN_PREFIXES = range(7, 11)
# Pairs, six int64 each, as below; a hash table of their numbers (uint32); the least count of a pair that is kept.
PAIRS, N_PAIRS, PAIRS_ROOM, PAIR_SLOTS, N_PAIR_SLOTS, THRESHOLD = range(11, 17)
# The lists of words (uint32), one after another.
LISTS, LISTS_USED, LISTS_ROOM = range(17, 20)
# The heap: numbers of pairs (int64) with their counts when they were pushed (int64).
HEAP, N_HEAP = 20, 21
# While a pair is merged: for each token the new pair with it before the new token, and the one with it after (uint32);
# the final number of each new pair (uint32); for each word with a new pair, the pair and the word (two uint32).
BEFORE, AFTER, NEW_NUMBERS, OCCURRENCES, OCCURRENCES_ROOM, N_OCCURRENCES = range(22, 28)
# What keys the hash table; see fields.py.
HASH_KEY, HASH_MULTIPLIER = 28, 29
N_FIELDS = 30

# The fields of a pair: its tokens, its count, the start and the length of its list, the word appended last.
FIRST, SECOND, COUNT, LIST, LIST_LENGTH, LAST_WORD = range(6)
PAIR_BYTES = 48

NONE = 0xFFFFFFFF


@jitted
def pair_field(state, pair, field):
    return load_i64(get(state, PAIRS) + PAIR_BYTES * pair + 8 * field)


@jitted
def set_pair_field(state, pair, field, value):
    store_i64(get(state, PAIRS) + PAIR_BYTES * pair + 8 * field, value)


@jitted
def change_pair_field(state, pair, field, difference):
    set_pair_field(state, pair, field, pair_field(state, pair, field) + difference)


@jitted
def new_pair(state, first, second):
    """Create a pair that is not in the hash table yet; returns its number."""
    pair = get(state, N_PAIRS)
    put(state, N_PAIRS, pair + 1)
    set_pair_field(state, pair, FIRST, first)
    set_pair_field(state, pair, SECOND, second)
    set_pair_field(state, pair, COUNT, 0)
    set_pair_field(state, pair, LIST_LENGTH, 0)
    set_pair_field(state, pair, LAST_WORD, -1)
    return pair


@jitted
def move_pair(state, pair, to):
    """Copy a pair to another number."""
    for field in range(PAIR_BYTES // 8):
        set_pair_field(state, to, field, pair_field(state, pair, field))


@jitted
def append_word(state, pair, word):
    """Append a word to a pair's list, which must have room."""
    length = pair_field(state, pair, LIST_LENGTH)
    store_u32(get(state, LISTS) + 4 * (pair_field(state, pair, LIST) + length), word)
    set_pair_field(state, pair, LIST_LENGTH, length + 1)


@jitted
def _slot(state, first, second):
    """The address of the slot with the number of a pair, or of the empty slot where it belongs."""
    mask = get(state, N_PAIR_SLOTS) - 1
    key = np.uint64((first << 32 | second) ^ get(state, HASH_KEY))
    slot = np.int64(folded_product(key, np.uint64(get(state, HASH_MULTIPLIER)))) & mask
    while True:
        address = get(state, PAIR_SLOTS) + 4 * slot
        pair = load_u32(address)
        if pair == NONE or (pair_field(state, pair, FIRST) == first and pair_field(state, pair, SECOND) == second):
            return address
        slot = (slot + 1) & mask


@jitted
def find_pair(state, first, second):
    """The number of a pair; -1 if it is not in the table."""
    pair = load_u32(_slot(state, first, second))
    return -1 if pair == NONE else pair


@jitted
def find_or_add_pair(state, first, second):
    """The number of a pair, which is created if it is missing; -1 if there is no room for it."""
    slot = _slot(state, first, second)
    pair = load_u32(slot)
    if pair == NONE:
        if get(state, N_PAIRS) >= get(state, PAIRS_ROOM):
            return -1
        pair = new_pair(state, first, second)
        store_u32(slot, pair)
    return pair


@jitted
def enter_pair(state, pair):
    store_u32(_slot(state, pair_field(state, pair, FIRST), pair_field(state, pair, SECOND)), pair)


@jitted
def _clear_slots(state):
    for slot in range(get(state, N_PAIR_SLOTS)):
        store_u32(get(state, PAIR_SLOTS) + 4 * slot, NONE)


@jitted
def forget_pairs(state):
    """Empty the pairs, the hash table and the heap."""
    put(state, N_PAIRS, 0)
    put(state, N_HEAP, 0)
    _clear_slots(state)


@jitted
def keep_frequent_pairs(state):
    """Drop the pairs below the threshold, and renumber the others."""
    n_all = get(state, N_PAIRS)
    forget_pairs(state)
    for pair in range(n_all):
        if pair_field(state, pair, COUNT) >= get(state, THRESHOLD):
            kept = get(state, N_PAIRS)
            move_pair(state, pair, kept)
            enter_pair(state, kept)
            put(state, N_PAIRS, kept + 1)


@CompiledFunction
def enter_pairs(state):
    _clear_slots(state)
    for pair in range(get(state, N_PAIRS)):
        enter_pair(state, pair)


# The heap: the most frequent pair first; of equally frequent ones, the greatest byte strings.


@jitted
def most_frequent(state):
    """The pair at the top, after updating outdated counts; -1 if none is as frequent as the threshold."""
    heap = get(state, HEAP)
    while get(state, N_HEAP):
        pair = load_i64(heap)
        count = pair_field(state, pair, COUNT)
        if count < get(state, THRESHOLD):
            pop(state)
        elif count == load_i64(heap + 8):
            return pair
        else:
            _sift_down(state, pair, count)
    return -1


@jitted
def pop(state):
    n_heap = get(state, N_HEAP) - 1
    put(state, N_HEAP, n_heap)
    last = get(state, HEAP) + 16 * n_heap
    if n_heap:
        _sift_down(state, load_i64(last), load_i64(last + 8))


@jitted
def _sift_down(state, pair, count):
    """Replace the entry at the top."""
    heap, n_heap = get(state, HEAP), get(state, N_HEAP)
    i = 0
    while 2 * i + 1 < n_heap:
        child = heap + 16 * (2 * i + 1)
        side = 0
        if 2 * i + 2 < n_heap and _comes_before(
            state, load_i64(child + 16), load_i64(child + 24), load_i64(child), load_i64(child + 8)
        ):
            side = 1
        child += 16 * side
        if not _comes_before(state, load_i64(child), load_i64(child + 8), pair, count):
            break
        _put_entry(heap, i, load_i64(child), load_i64(child + 8))
        i = 2 * i + 1 + side
    _put_entry(heap, i, pair, count)


@jitted
def push(state, pair):
    heap, i = get(state, HEAP), get(state, N_HEAP)
    count = pair_field(state, pair, COUNT)
    put(state, N_HEAP, i + 1)
    while i:
        parent = heap + 16 * ((i - 1) >> 1)
        if not _comes_before(state, pair, count, load_i64(parent), load_i64(parent + 8)):
            break
        _put_entry(heap, i, load_i64(parent), load_i64(parent + 8))
        i = (i - 1) >> 1
    _put_entry(heap, i, pair, count)


@jitted
def _put_entry(heap, i, pair, count):
    store_i64(heap + 16 * i, pair)
    store_i64(heap + 16 * i + 8, count)


@jitted
def _comes_before(state, pair, count, other, other_count):
    if count != other_count:
        return count > other_count
    first, other_first = pair_field(state, pair, FIRST), pair_field(state, other, FIRST)
    second, other_second = pair_field(state, pair, SECOND), pair_field(state, other, SECOND)
    order = _compare(state, first, other_first)
    if order == 0:
        order = _compare(state, second, other_second)
    if order != 0:
        return order > 0
    # The same bytes, merged differently: the pair learned earlier.
    return first < other_first or (first == other_first and second < other_second)


# The bytes of tokens.


@jitted
def _compare(state, token, other):
    """Negative, 0 or positive if the bytes of a token are less than, equal to or greater than another's."""
    if token == other:
        return 0
    prefixes = get(state, TOKEN_PREFIXES)
    prefix, other_prefix = load_u64(prefixes + 8 * token), load_u64(prefixes + 8 * other)
    if prefix != other_prefix:
        return 1 if prefix > other_prefix else -1
    length, other_length = token_length(state, token), token_length(state, other)
    start = get(state, TOKEN_BYTES) + token_start(state, token)
    other_start = get(state, TOKEN_BYTES) + token_start(state, other)
    for i in range(min(length, other_length)):
        difference = load_u8(start + i) - load_u8(other_start + i)
        if difference:
            return difference
    return length - other_length


@jitted
def token_start(state, token):
    return load_i64(get(state, TOKEN_STARTS) + 8 * token)


@jitted
def token_length(state, token):
    return token_start(state, token + 1) - token_start(state, token)


@jitted
def add_token(state, new, first, second):
    """Store the bytes of a new token, for which there must be room."""
    end = get(state, TOKEN_BYTES) + token_start(state, new)
    n_bytes = 0
    for token in (first, second):
        start = get(state, TOKEN_BYTES) + token_start(state, token)
        for i in range(token_length(state, token)):
            store_u8(end + n_bytes, load_u8(start + i))
            n_bytes += 1
    store_i64(get(state, TOKEN_STARTS) + 8 * (new + 1), token_start(state, new) + n_bytes)
    prefix = 0
    for i in range(8):
        prefix = prefix << 8 | (load_u8(end + i) if i < n_bytes else 0)
    store_i64(get(state, TOKEN_PREFIXES) + 8 * new, prefix)


# What the functions return besides DONE: the buffer that is too small, or EXHAUSTED.
NEEDS_PAIRS, NEEDS_LISTS, NEEDS_OCCURRENCES, NEEDS_TOKEN_BYTES, EXHAUSTED = range(1, 6)


@CompiledFunction
def learn(state, until):
    """Learn merges until there are `until` of them.

    Returns DONE, the buffer that is too small, or EXHAUSTED if no pair as frequent as the threshold is left. It only
    stops between two merges.
    """
    while get(state, N_MERGES) < until:
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
    for word in range(get(state, N_WORDS)):
        count = load_i64(get(state, COUNTS) + 8 * word)
        start = get(state, TOKENS) + 4 * load_u32(get(state, STARTS) + 4 * word)
        for i in range(load_u32(get(state, LENGTHS) + 4 * word) - 1):
            pair = find_or_add_pair(state, load_u32(start + 4 * i), load_u32(start + 4 * i + 4))
            if pair < 0:
                return NEEDS_PAIRS
            change_pair_field(state, pair, COUNT, count)
            if pair_field(state, pair, LAST_WORD) != word:
                set_pair_field(state, pair, LAST_WORD, word)
                change_pair_field(state, pair, LIST_LENGTH, 1)
    keep_frequent_pairs(state)
    used = 0
    for pair in range(get(state, N_PAIRS)):
        set_pair_field(state, pair, LIST, used)
        used += pair_field(state, pair, LIST_LENGTH)
        set_pair_field(state, pair, LIST_LENGTH, 0)
        set_pair_field(state, pair, LAST_WORD, -1)
    put(state, LISTS_USED, used)
    if used > get(state, LISTS_ROOM):
        return NEEDS_LISTS
    for word in range(get(state, N_WORDS)):
        start = get(state, TOKENS) + 4 * load_u32(get(state, STARTS) + 4 * word)
        for i in range(load_u32(get(state, LENGTHS) + 4 * word) - 1):
            pair = find_pair(state, load_u32(start + 4 * i), load_u32(start + 4 * i + 4))
            if pair >= 0 and pair_field(state, pair, LAST_WORD) != word:
                set_pair_field(state, pair, LAST_WORD, word)
                append_word(state, pair, word)
    for pair in range(get(state, N_PAIRS)):
        push(state, pair)
    return fields.DONE


@jitted
def _has_room(state, pair):
    """DONE if the buffers have room for all that merging a pair may add, otherwise the one that is too small."""
    words, n_symbols = get(state, LISTS) + 4 * pair_field(state, pair, LIST), 0
    for i in range(pair_field(state, pair, LIST_LENGTH)):
        n_symbols += load_u32(get(state, LENGTHS) + 4 * load_u32(words + 4 * i)) + 1
    # An occurrence consists of two tokens and adds at most two pairs.
    if n_symbols > get(state, OCCURRENCES_ROOM):
        put(state, N_OCCURRENCES, n_symbols)
        return NEEDS_OCCURRENCES
    if get(state, LISTS_USED) + n_symbols > get(state, LISTS_ROOM):
        return NEEDS_LISTS
    arising = min(n_symbols, 2 * (257 + get(state, N_MERGES)))
    if get(state, N_PAIRS) + arising > get(state, PAIRS_ROOM):
        return NEEDS_PAIRS
    n_bytes = token_length(state, pair_field(state, pair, FIRST)) + token_length(state, pair_field(state, pair, SECOND))
    if token_start(state, 256 + get(state, N_MERGES)) + n_bytes > get(state, TOKEN_BYTES_ROOM):
        return NEEDS_TOKEN_BYTES
    return fields.DONE


@jitted
def _merge(state, pair):
    """Replace a pair by a new token in all words that contain it."""
    first, second = pair_field(state, pair, FIRST), pair_field(state, pair, SECOND)
    number = get(state, N_MERGES)
    new = 256 + number
    store_i64(get(state, MERGES) + 16 * number, first)
    store_i64(get(state, MERGES) + 16 * number + 8, second)
    put(state, N_MERGES, number + 1)
    add_token(state, new, first, second)
    base = get(state, N_PAIRS)
    put(state, N_OCCURRENCES, 0)
    words = get(state, LISTS) + 4 * pair_field(state, pair, LIST)
    for i in range(pair_field(state, pair, LIST_LENGTH)):
        _rewrite(state, load_u32(words + 4 * i), first, second, new)
    set_pair_field(state, pair, COUNT, 0)
    _lower_replaced_pairs(state, base, first, second, new)
    _keep_frequent_new_pairs(state, base)


@jitted
def _rewrite(state, word, first, second, new):
    symbols = get(state, TOKENS) + 4 * load_u32(get(state, STARTS) + 4 * word)
    length = load_u32(get(state, LENGTHS) + 4 * word)
    count = load_i64(get(state, COUNTS) + 8 * word)
    i, kept = 0, 0
    while i < length:
        symbol = load_u32(symbols + 4 * i)
        following = load_u32(symbols + 4 * i + 4) if i + 1 < length else -1
        if symbol != first or following != second:
            # The token before this one has just been created.
            if kept and load_u32(symbols + 4 * kept - 4) == new:
                _add_occurrence(state, get(state, AFTER) + 4 * symbol, new, symbol, word, count)
            store_u32(symbols + 4 * kept, symbol)
            i += 1
        else:
            if kept:
                before = load_u32(symbols + 4 * kept - 4)
                _add_occurrence(state, get(state, BEFORE) + 4 * before, before, new, word, count)
            store_u32(symbols + 4 * kept, new)
            i += 2
        kept += 1
    store_u32(get(state, LENGTHS) + 4 * word, kept)


@jitted
def _add_occurrence(state, number, first, second, word, count):
    """Record an occurrence of a pair with the new token; its number, or NONE, is at the address `number`."""
    pair = load_u32(number)
    if pair == NONE:
        pair = new_pair(state, first, second)
        store_u32(number, pair)
    change_pair_field(state, pair, COUNT, count)
    if pair_field(state, pair, LAST_WORD) != word:
        set_pair_field(state, pair, LAST_WORD, word)
        change_pair_field(state, pair, LIST_LENGTH, 1)
        note = get(state, OCCURRENCES) + 8 * get(state, N_OCCURRENCES)
        store_u32(note, pair)
        store_u32(note + 4, word)
        put(state, N_OCCURRENCES, get(state, N_OCCURRENCES) + 1)


@jitted
def _lower_replaced_pairs(state, base, first, second, new):
    """Lower the counts of the pairs that pairs with the new token have replaced."""
    for pair in range(base, get(state, N_PAIRS)):
        before, after = pair_field(state, pair, FIRST), pair_field(state, pair, SECOND)
        if after == new:
            store_u32(get(state, BEFORE) + 4 * before, NONE)
        else:
            store_u32(get(state, AFTER) + 4 * after, NONE)
        gone_first = second if before == new else before
        gone_second = first if after == new else after
        if gone_first == first and gone_second == second:
            continue
        gone = find_pair(state, gone_first, gone_second)
        if gone >= 0:
            change_pair_field(state, gone, COUNT, -pair_field(state, pair, COUNT))


@jitted
def _keep_frequent_new_pairs(state, base):
    """Give the frequent ones of the pairs from `base` on a list and a heap entry, and drop the others."""
    n_pairs, used, threshold = base, get(state, LISTS_USED), get(state, THRESHOLD)
    for pair in range(base, get(state, N_PAIRS)):
        new_number = NONE
        if pair_field(state, pair, COUNT) >= threshold:
            new_number = n_pairs
            move_pair(state, pair, n_pairs)
            set_pair_field(state, n_pairs, LIST, used)
            used += pair_field(state, n_pairs, LIST_LENGTH)
            set_pair_field(state, n_pairs, LIST_LENGTH, 0)
            n_pairs += 1
        store_u32(get(state, NEW_NUMBERS) + 4 * (pair - base), new_number)
    put(state, N_PAIRS, n_pairs)
    put(state, LISTS_USED, used)
    for i in range(get(state, N_OCCURRENCES)):
        note = get(state, OCCURRENCES) + 8 * i
        pair = load_u32(get(state, NEW_NUMBERS) + 4 * (load_u32(note) - base))
        if pair != NONE:
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
    return [(first, second) for first, second in learner.array(MERGES)[:done].tolist()]


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
        super().__init__(N_FIELDS, HASH_KEY)
        lengths, vocab_size = np.diff(starts), 256 + n_merges
        token_starts = np.zeros(vocab_size + 1, np.int64)
        token_starts[:257] = np.arange(257)
        prefixes = np.zeros(vocab_size, np.uint64)
        prefixes[:256] = np.arange(256, dtype=np.uint64) << np.uint64(56)
        self.point(TOKENS, symbols)
        self.point(STARTS, starts)
        self.point(LENGTHS, lengths)
        self.point(COUNTS, counts, N_WORDS)
        self.point(MERGES, np.empty((n_merges, 2), np.int64))
        self.point(TOKEN_STARTS, token_starts)
        self.point(TOKEN_PREFIXES, prefixes)
        self.point(TOKEN_BYTES, np.arange(max(256, 8 * vocab_size)).astype(np.uint8), TOKEN_BYTES_ROOM)
        self.point(BEFORE, np.full(vocab_size, NONE, np.uint32))
        self.point(AFTER, np.full(vocab_size, NONE, np.uint32))
        self.point(NEW_NUMBERS, np.empty(2 * vocab_size + 1, np.uint32))
        self.point(OCCURRENCES, np.empty((2**12, 2), np.uint32), OCCURRENCES_ROOM)
        self.point(LISTS, np.empty(len(symbols), np.uint32), LISTS_ROOM)
        self.point(PAIRS, np.empty((0, 6), np.int64))
        self.point(HEAP, np.empty((0, 2), np.int64))
        self._allocate_pairs(2**16)
        if threshold is None:
            n_occurrences = int((counts * (lengths - np.uint32(1))).sum()) if len(counts) else 0
            threshold = n_occurrences // (128 * max(n_merges, 1))
        self.state[THRESHOLD] = max(threshold, 1)
        self._index()

    def learn(self, until: int) -> int:
        """Learn merges until there are `until` of them, or no pair is left; returns how many there are."""
        state = self.state
        while (status := learn(self.address, until)) != fields.DONE:
            if status != EXHAUSTED:
                self._make_room(status)
            elif state[THRESHOLD] == 1:
                break
            else:
                state[THRESHOLD] = max(1, int(state[THRESHOLD]) // 16)
                self._index()
        return int(state[N_MERGES])

    def _index(self) -> None:
        while (status := index_pairs(self.address)) != fields.DONE:
            self._make_room(status)

    def _make_room(self, status: int) -> None:
        if status == NEEDS_PAIRS:
            self._allocate_pairs(2 * int(self.state[PAIRS_ROOM]))
            return
        field, room, wanted = {
            NEEDS_LISTS: (LISTS, LISTS_ROOM, int(self.state[LISTS_USED])),
            NEEDS_OCCURRENCES: (OCCURRENCES, OCCURRENCES_ROOM, int(self.state[N_OCCURRENCES])),
            NEEDS_TOKEN_BYTES: (TOKEN_BYTES, TOKEN_BYTES_ROOM, 0),
        }[status]
        self._enlarge(field, max(2 * len(self.array(field)), wanted), room)

    def _allocate_pairs(self, room: int) -> None:
        self._enlarge(PAIRS, room, PAIRS_ROOM)
        self._enlarge(HEAP, room)
        self.point(PAIR_SLOTS, np.empty(4 * room, np.uint32), N_PAIR_SLOTS)
        enter_pairs(self.address)

    def _enlarge(self, field: int, size: int, room: int | None = None) -> None:
        old = self.array(field)
        new = np.empty((size, *old.shape[1:]), old.dtype)
        new[: len(old)] = old
        self.point(field, new, room)
