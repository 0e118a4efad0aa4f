"""What merges are learned with: the pairs, each with its words, in a table and in a heap; the bytes of tokens.

Each pair of adjacent tokens that is frequent enough has a count, a list of the words it occurs in, and an entry in a
heap whose top is the most frequent pair. `learn_merges.py` counts, merges and rewrites words with these.

The state is an int64 array as in fields.py, with fields of its own.
"""

import numpy as np

from napkin.machine_code.compiled_function import jitted
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
from napkin.tokenizer.numba.fields import get, put

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
    """The number of a pair, which is created if it is missing; -1 if the table is full."""
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
def clear_slots(state):
    for slot in range(get(state, N_PAIR_SLOTS)):
        store_u32(get(state, PAIR_SLOTS) + 4 * slot, NONE)


@jitted
def forget_pairs(state):
    """Empty the pairs, the hash table and the heap."""
    put(state, N_PAIRS, 0)
    put(state, N_HEAP, 0)
    clear_slots(state)


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
