"""What learning.py keeps of pairs of tokens: their fields, a hash table, a heap; and the bytes of tokens, for ties.

The job here is an array of its own, with the fields below.
"""

import numpy as np

from napkin.tokenizer.compiled.intrinsics import load_i64, load_u8, load_u32, load_u64, store_i64, store_u8, store_u32
from napkin.tokenizer.compiled.jobs import get, put
from napkin.tokenizer.compiled.machine_code import compiled, part

# Words: their tokens (uint32), where each begins (uint32), how many tokens it has (uint32) and how often it occurs
# (int64).
N_WORDS, SYMBOLS, STARTS, LENGTHS, COUNTS = range(5)
# The merges (int64 of shape [n, 2]), how many there are and are wanted; merge i makes token 256 + i.
MERGES, N_MERGES = 5, 6
# Bytes of the tokens, where each begins and the last ends (int64), and its first 8 bytes as a big-endian number
# (uint64).
TOKEN_BYTES, TOKEN_BYTES_ROOM, TOKEN_STARTS, TOKEN_PREFIXES = range(7, 11)
# Pairs, six int64 each, as below; a hash table of their numbers (uint32).
PAIRS, N_PAIRS, PAIRS_ROOM, PAIR_SLOTS, N_PAIR_SLOTS, THRESHOLD = range(11, 17)
# The lists of words (uint32), one after the other.
LISTS, LISTS_USED, LISTS_ROOM = range(17, 20)
# The heap: numbers of pairs (int64) and the counts they had when they were put there (int64).
HEAP, N_HEAP = 20, 21
# While a pair is merged: for each token the pair that arises with it before the new one, and behind it (uint32); what
# becomes of each that arises (uint32); and for each of their places the pair and the word (two uint32).
BEFORE, BEHIND, RENUMBERED, NOTES, NOTES_ROOM, N_NOTES = range(22, 28)
N_FIELDS = 28

# Fields of a pair: its tokens, its count, where its list begins and how long it is, the word last put there.
FIRST, SECOND, COUNT, LIST, LIST_LENGTH, LAST_WORD = range(6)
PAIR_BYTES = 48

NONE = 0xFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@part
def pair_field(job, pair, field):
    """One of a pair's fields."""
    return load_i64(get(job, PAIRS) + PAIR_BYTES * pair + 8 * field)


@part
def set_pair_field(job, pair, field, value):
    """Set one of a pair's fields."""
    store_i64(get(job, PAIRS) + PAIR_BYTES * pair + 8 * field, value)


@part
def change_pair_field(job, pair, field, difference):
    """Add to one of a pair's fields."""
    set_pair_field(job, pair, field, pair_field(job, pair, field) + difference)


@part
def new_pair(job, first, second):
    """The number of a new pair, which has no place in the hash table yet."""
    pair = get(job, N_PAIRS)
    put(job, N_PAIRS, pair + 1)
    set_pair_field(job, pair, FIRST, first)
    set_pair_field(job, pair, SECOND, second)
    set_pair_field(job, pair, COUNT, 0)
    set_pair_field(job, pair, LIST_LENGTH, 0)
    set_pair_field(job, pair, LAST_WORD, -1)
    return pair


@part
def move_pair(job, pair, to):
    """Copy a pair to another number."""
    for field in range(PAIR_BYTES // 8):
        set_pair_field(job, to, field, pair_field(job, pair, field))


@part
def append_word(job, pair, word):
    """Put a word at the end of a pair's list, for which there is room."""
    length = pair_field(job, pair, LIST_LENGTH)
    store_u32(get(job, LISTS) + 4 * (pair_field(job, pair, LIST) + length), word)
    set_pair_field(job, pair, LIST_LENGTH, length + 1)


@part
def _slot(job, first, second):
    """Address of the slot that holds the number of a pair, or NONE where it belongs."""
    mask = get(job, N_PAIR_SLOTS) - 1
    key = np.uint64(first << 32 | second) * _GOLDEN
    slot = np.int64(key ^ key >> np.uint64(32)) & mask
    while True:
        address = get(job, PAIR_SLOTS) + 4 * slot
        pair = load_u32(address)
        if pair == NONE or (pair_field(job, pair, FIRST) == first and pair_field(job, pair, SECOND) == second):
            return address
        slot = (slot + 1) & mask


@part
def find_pair(job, first, second):
    """The number of a pair; -1 where it has none."""
    pair = load_u32(_slot(job, first, second))
    return -1 if pair == NONE else pair


@part
def find_or_add_pair(job, first, second):
    """The number of a pair; -1 where it has none and there is no room for it."""
    slot = _slot(job, first, second)
    pair = load_u32(slot)
    if pair == NONE:
        if get(job, N_PAIRS) >= get(job, PAIRS_ROOM):
            return -1
        pair = new_pair(job, first, second)
        store_u32(slot, pair)
    return pair


@part
def enter_pair(job, pair):
    """Put a pair into the hash table."""
    store_u32(_slot(job, pair_field(job, pair, FIRST), pair_field(job, pair, SECOND)), pair)


@part
def forget_pairs(job):
    """Empty pairs, hash table and heap."""
    put(job, N_PAIRS, 0)
    put(job, N_HEAP, 0)
    for slot in range(get(job, N_PAIR_SLOTS)):
        store_u32(get(job, PAIR_SLOTS) + 4 * slot, NONE)


@part
def keep_frequent_pairs(job):
    """Renumber the pairs that are frequent, and drop the others."""
    n_all = get(job, N_PAIRS)
    forget_pairs(job)
    for pair in range(n_all):
        if pair_field(job, pair, COUNT) >= get(job, THRESHOLD):
            kept = get(job, N_PAIRS)
            move_pair(job, pair, kept)
            enter_pair(job, kept)
            put(job, N_PAIRS, kept + 1)


@compiled("void(int64)")
def enter_pairs(job):
    """Fill a new hash table with the pairs there are."""
    for slot in range(get(job, N_PAIR_SLOTS)):
        store_u32(get(job, PAIR_SLOTS) + 4 * slot, NONE)
    for pair in range(get(job, N_PAIRS)):
        enter_pair(job, pair)


# The heap: the most frequent pair first, of equally frequent ones the greatest byte strings.


@part
def most_frequent(job):
    """The pair at the top, once its count is up to date; -1 where there is none as frequent as the threshold."""
    heap = get(job, HEAP)
    while get(job, N_HEAP):
        pair = load_i64(heap)
        count = pair_field(job, pair, COUNT)
        if count < get(job, THRESHOLD):
            pop(job)
        elif count == load_i64(heap + 8):
            return pair
        else:
            _sift_down(job, pair, count)
    return -1


@part
def pop(job):
    """Take away the top of the heap."""
    n_heap = get(job, N_HEAP) - 1
    put(job, N_HEAP, n_heap)
    last = get(job, HEAP) + 16 * n_heap
    if n_heap:
        _sift_down(job, load_i64(last), load_i64(last + 8))


@part
def _sift_down(job, pair, count):
    """Put an entry in place of the one at the top."""
    heap, n_heap = get(job, HEAP), get(job, N_HEAP)
    i = 0
    while 2 * i + 1 < n_heap:
        child = heap + 16 * (2 * i + 1)
        side = 0
        if 2 * i + 2 < n_heap and _comes_before(
            job, load_i64(child + 16), load_i64(child + 24), load_i64(child), load_i64(child + 8)
        ):
            side = 1
        child += 16 * side
        if not _comes_before(job, load_i64(child), load_i64(child + 8), pair, count):
            break
        _put_entry(heap, i, load_i64(child), load_i64(child + 8))
        i = 2 * i + 1 + side
    _put_entry(heap, i, pair, count)


@part
def push(job, pair):
    """Put a pair into the heap."""
    heap, i = get(job, HEAP), get(job, N_HEAP)
    count = pair_field(job, pair, COUNT)
    put(job, N_HEAP, i + 1)
    while i:
        parent = heap + 16 * ((i - 1) >> 1)
        if not _comes_before(job, pair, count, load_i64(parent), load_i64(parent + 8)):
            break
        _put_entry(heap, i, load_i64(parent), load_i64(parent + 8))
        i = (i - 1) >> 1
    _put_entry(heap, i, pair, count)


@part
def _put_entry(heap, i, pair, count):
    store_i64(heap + 16 * i, pair)
    store_i64(heap + 16 * i + 8, count)


@part
def _comes_before(job, pair, count, other, other_count):
    if count != other_count:
        return count > other_count
    first, other_first = pair_field(job, pair, FIRST), pair_field(job, other, FIRST)
    second, other_second = pair_field(job, pair, SECOND), pair_field(job, other, SECOND)
    order = _compare(job, first, other_first)
    if order == 0:
        order = _compare(job, second, other_second)
    if order != 0:
        return order > 0
    # The same bytes by other ways: the one learned earlier.
    return first < other_first or (first == other_first and second < other_second)


# The bytes of tokens.


@part
def _compare(job, token, other):
    """Below 0, 0 or above 0 as the bytes of a token are less than, the same as or greater than another's."""
    if token == other:
        return 0
    prefixes = get(job, TOKEN_PREFIXES)
    prefix, other_prefix = load_u64(prefixes + 8 * token), load_u64(prefixes + 8 * other)
    if prefix != other_prefix:
        return 1 if prefix > other_prefix else -1
    length, other_length = token_length(job, token), token_length(job, other)
    start = get(job, TOKEN_BYTES) + token_start(job, token)
    other_start = get(job, TOKEN_BYTES) + token_start(job, other)
    for i in range(min(length, other_length)):
        difference = load_u8(start + i) - load_u8(other_start + i)
        if difference:
            return difference
    return length - other_length


@part
def token_start(job, token):
    """Where the bytes of a token begin."""
    return load_i64(get(job, TOKEN_STARTS) + 8 * token)


@part
def token_length(job, token):
    """How many bytes per token has."""
    return token_start(job, token + 1) - token_start(job, token)


@part
def add_token(job, new, first, second):
    """Write down the bytes of a new token, for which there is room."""
    end = get(job, TOKEN_BYTES) + token_start(job, new)
    n_bytes = 0
    for token in (first, second):
        start = get(job, TOKEN_BYTES) + token_start(job, token)
        for i in range(token_length(job, token)):
            store_u8(end + n_bytes, load_u8(start + i))
            n_bytes += 1
    store_i64(get(job, TOKEN_STARTS) + 8 * (new + 1), token_start(job, new) + n_bytes)
    prefix = 0
    for i in range(8):
        prefix = prefix << 8 | (load_u8(end + i) if i < n_bytes else 0)
    store_i64(get(job, TOKEN_PREFIXES) + 8 * new, prefix)
