"""Learning merges from counted words, compiled. Plain twin: `learn_merges` in bpe_training.py.

A word is a row of tokens. Each pair of neighbours that is frequent enough has its count, the list of the words it occurs
in, and a place in a heap from which the most frequent comes. Merging a pair rewrites the words of its list. All places of
a pair arise while the later of its two tokens is made, so its list is complete then and from then on its count only
falls: the heap's entry is lowered when it comes to the top out of date, and a list may name words that no longer hold
the pair.

Pairs rarer than THRESHOLD have none of this: most are rare and never merged. Where all others are used up, the words are
gone through again with a lower threshold.

A job here is an array of its own; its fields are below.
"""

import numpy as np

from napkin.tokenizer.compiled.intrinsics import load_i64, load_u8, load_u32, load_u64, store_i64, store_u8, store_u32
from napkin.tokenizer.compiled.jobs import DONE, get, put
from napkin.tokenizer.compiled.machine_code import compiled, part

# Words: their tokens (uint32), where each begins (uint32), how many tokens it has (uint32) and how often it occurs (int64).
N_WORDS, SYMBOLS, STARTS, LENGTHS, COUNTS = range(5)
# The merges (int64 of shape [n, 2]), how many there are and are wanted; merge i makes token 256 + i.
MERGES, N_MERGES = 5, 6
# Bytes of the tokens, where each begins and the last ends (int64), and its first 8 bytes as a big-endian number (uint64).
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
_FIRST, _SECOND, _COUNT, _LIST, _LIST_LENGTH, _LAST_WORD = range(6)
PAIR_BYTES = 48

# What the functions return besides DONE.
NEEDS_PAIRS, NEEDS_LISTS, NEEDS_NOTES, NEEDS_TOKEN_BYTES, EXHAUSTED = range(1, 6)

NONE = 0xFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@compiled("int64(int64, int64)")
def learn(job, until):
    """Learn merges until there are `until` of them.

    Returns DONE, what there is too little of, or EXHAUSTED, where no pair as frequent as the threshold is left. In all
    but the first case it has stopped between two merges.
    """
    while get(job, N_MERGES) < until:
        pair = _most_frequent(job)
        if pair < 0:
            return EXHAUSTED
        status = _has_room(job, pair)
        if status != DONE:
            return status
        _pop(job)
        _merge(job, pair)
    return DONE


@compiled("int64(int64)")
def index_pairs(job):
    """Count the pairs of all words and make lists and heap of those as frequent as the threshold.

    Returns DONE, or what there is too little of: then it must be called again.
    """
    _forget_pairs(job)
    for word in range(get(job, N_WORDS)):
        count = load_i64(get(job, COUNTS) + 8 * word)
        start = get(job, SYMBOLS) + 4 * load_u32(get(job, STARTS) + 4 * word)
        for i in range(load_u32(get(job, LENGTHS) + 4 * word) - 1):
            pair = _find_or_add(job, load_u32(start + 4 * i), load_u32(start + 4 * i + 4))
            if pair < 0:
                return NEEDS_PAIRS
            _change(job, pair, _COUNT, count)
            if _of(job, pair, _LAST_WORD) != word:
                _set(job, pair, _LAST_WORD, word)
                _change(job, pair, _LIST_LENGTH, 1)
    _keep_frequent(job)
    used = 0
    for pair in range(get(job, N_PAIRS)):
        _set(job, pair, _LIST, used)
        used += _of(job, pair, _LIST_LENGTH)
        _set(job, pair, _LIST_LENGTH, 0)
        _set(job, pair, _LAST_WORD, -1)
    if used > get(job, LISTS_ROOM):
        put(job, LISTS_USED, used)
        return NEEDS_LISTS
    put(job, LISTS_USED, used)
    for word in range(get(job, N_WORDS)):
        start = get(job, SYMBOLS) + 4 * load_u32(get(job, STARTS) + 4 * word)
        for i in range(load_u32(get(job, LENGTHS) + 4 * word) - 1):
            pair = _find(job, load_u32(start + 4 * i), load_u32(start + 4 * i + 4))
            if pair >= 0 and _of(job, pair, _LAST_WORD) != word:
                _set(job, pair, _LAST_WORD, word)
                _append(job, pair, word)
    for pair in range(get(job, N_PAIRS)):
        _push(job, pair)
    return DONE


@part
def _has_room(job, pair):
    """Whether there is room for all that merging a pair may add."""
    words, n_symbols = get(job, LISTS) + 4 * _of(job, pair, _LIST), 0
    for i in range(_of(job, pair, _LIST_LENGTH)):
        n_symbols += load_u32(get(job, LENGTHS) + 4 * load_u32(words + 4 * i)) + 1
    # A place that is merged has two neighbours, and takes two tokens.
    if n_symbols > get(job, NOTES_ROOM):
        put(job, N_NOTES, n_symbols)
        return NEEDS_NOTES
    if get(job, LISTS_USED) + n_symbols > get(job, LISTS_ROOM):
        return NEEDS_LISTS
    arising = min(n_symbols, 2 * (257 + get(job, N_MERGES)))
    if get(job, N_PAIRS) + arising > get(job, PAIRS_ROOM):
        return NEEDS_PAIRS
    n_bytes = _token_length(job, _of(job, pair, _FIRST)) + _token_length(job, _of(job, pair, _SECOND))
    if _token_start(job, 256 + get(job, N_MERGES)) + n_bytes > get(job, TOKEN_BYTES_ROOM):
        return NEEDS_TOKEN_BYTES
    return DONE


@part
def _merge(job, pair):
    """Make a new token of a pair in all words that hold it."""
    first, second = _of(job, pair, _FIRST), _of(job, pair, _SECOND)
    number = get(job, N_MERGES)
    new = 256 + number
    store_i64(get(job, MERGES) + 16 * number, first)
    store_i64(get(job, MERGES) + 16 * number + 8, second)
    put(job, N_MERGES, number + 1)
    _add_token(job, new, first, second)
    base = get(job, N_PAIRS)
    put(job, N_NOTES, 0)
    words = get(job, LISTS) + 4 * _of(job, pair, _LIST)
    for i in range(_of(job, pair, _LIST_LENGTH)):
        _rewrite(job, load_u32(words + 4 * i), first, second, new)
    _set(job, pair, _COUNT, 0)
    _take_from_pairs_gone(job, base, first, second, new)
    _keep_arisen(job, base)


@part
def _rewrite(job, word, first, second, new):
    symbols = get(job, SYMBOLS) + 4 * load_u32(get(job, STARTS) + 4 * word)
    length = load_u32(get(job, LENGTHS) + 4 * word)
    count = load_i64(get(job, COUNTS) + 8 * word)
    i, kept = 0, 0
    while i < length:
        symbol = load_u32(symbols + 4 * i)
        following = load_u32(symbols + 4 * i + 4) if i + 1 < length else -1
        if symbol != first or following != second:
            # A token whose neighbour before it has just been made.
            if kept and load_u32(symbols + 4 * kept - 4) == new:
                _arise(job, get(job, BEHIND) + 4 * symbol, new, symbol, word, count)
            store_u32(symbols + 4 * kept, symbol)
            i += 1
        else:
            if kept:
                before = load_u32(symbols + 4 * kept - 4)
                _arise(job, get(job, BEFORE) + 4 * before, before, new, word, count)
            store_u32(symbols + 4 * kept, new)
            i += 2
        kept += 1
    store_u32(get(job, LENGTHS) + 4 * word, kept)


@part
def _arise(job, number, first, second, word, count):
    """Note a place of a pair with the new token; `number` is the address of the pair's number, NONE until it has one."""
    pair = load_u32(number)
    if pair == NONE:
        pair = _new_pair(job, first, second)
        store_u32(number, pair)
    _change(job, pair, _COUNT, count)
    if _of(job, pair, _LAST_WORD) != word:
        _set(job, pair, _LAST_WORD, word)
        _change(job, pair, _LIST_LENGTH, 1)
        note = get(job, NOTES) + 8 * get(job, N_NOTES)
        store_u32(note, pair)
        store_u32(note + 4, word)
        put(job, N_NOTES, get(job, N_NOTES) + 1)


@part
def _take_from_pairs_gone(job, base, first, second, new):
    """Where a pair with the new token arose, one with a half of it was before."""
    for pair in range(base, get(job, N_PAIRS)):
        before, behind = _of(job, pair, _FIRST), _of(job, pair, _SECOND)
        if behind == new:
            store_u32(get(job, BEFORE) + 4 * before, NONE)
        else:
            store_u32(get(job, BEHIND) + 4 * behind, NONE)
        gone_first = second if before == new else before
        gone_second = first if behind == new else behind
        if gone_first == first and gone_second == second:
            continue
        gone = _find(job, gone_first, gone_second)
        if gone >= 0:
            _change(job, gone, _COUNT, -_of(job, pair, _COUNT))


@part
def _keep_arisen(job, base):
    """Of the pairs from `base` on, give those a list and a place in the heap that are frequent, and drop the others."""
    n_pairs, used, threshold = base, get(job, LISTS_USED), get(job, THRESHOLD)
    for pair in range(base, get(job, N_PAIRS)):
        renumbered = NONE
        if _of(job, pair, _COUNT) >= threshold:
            renumbered = n_pairs
            _move(job, pair, n_pairs)
            _set(job, n_pairs, _LIST, used)
            used += _of(job, n_pairs, _LIST_LENGTH)
            _set(job, n_pairs, _LIST_LENGTH, 0)
            n_pairs += 1
        store_u32(get(job, RENUMBERED) + 4 * (pair - base), renumbered)
    put(job, N_PAIRS, n_pairs)
    put(job, LISTS_USED, used)
    for i in range(get(job, N_NOTES)):
        note = get(job, NOTES) + 8 * i
        pair = load_u32(get(job, RENUMBERED) + 4 * (load_u32(note) - base))
        if pair != NONE:
            _append(job, pair, load_u32(note + 4))
    for pair in range(base, n_pairs):
        _enter(job, pair)
        _push(job, pair)


# Pairs and their hash table.


@part
def _of(job, pair, field):
    return load_i64(get(job, PAIRS) + PAIR_BYTES * pair + 8 * field)


@part
def _set(job, pair, field, value):
    store_i64(get(job, PAIRS) + PAIR_BYTES * pair + 8 * field, value)


@part
def _change(job, pair, field, difference):
    _set(job, pair, field, _of(job, pair, field) + difference)


@part
def _new_pair(job, first, second):
    pair = get(job, N_PAIRS)
    put(job, N_PAIRS, pair + 1)
    _set(job, pair, _FIRST, first)
    _set(job, pair, _SECOND, second)
    _set(job, pair, _COUNT, 0)
    _set(job, pair, _LIST_LENGTH, 0)
    _set(job, pair, _LAST_WORD, -1)
    return pair


@part
def _move(job, pair, to):
    for field in range(PAIR_BYTES // 8):
        _set(job, to, field, _of(job, pair, field))


@part
def _append(job, pair, word):
    length = _of(job, pair, _LIST_LENGTH)
    store_u32(get(job, LISTS) + 4 * (_of(job, pair, _LIST) + length), word)
    _set(job, pair, _LIST_LENGTH, length + 1)


@part
def _slot(job, first, second):
    """Address of the slot that holds the number of a pair, or NONE where it belongs."""
    mask = get(job, N_PAIR_SLOTS) - 1
    key = np.uint64(first << 32 | second) * _GOLDEN
    slot = np.int64(key ^ key >> np.uint64(32)) & mask
    while True:
        address = get(job, PAIR_SLOTS) + 4 * slot
        pair = load_u32(address)
        if pair == NONE or (_of(job, pair, _FIRST) == first and _of(job, pair, _SECOND) == second):
            return address
        slot = (slot + 1) & mask


@part
def _find(job, first, second):
    """The number of a pair; -1 where it has none."""
    pair = load_u32(_slot(job, first, second))
    return -1 if pair == NONE else pair


@part
def _find_or_add(job, first, second):
    """The number of a pair; -1 where it has none and there is no room for it."""
    slot = _slot(job, first, second)
    pair = load_u32(slot)
    if pair == NONE:
        if get(job, N_PAIRS) >= get(job, PAIRS_ROOM):
            return -1
        pair = _new_pair(job, first, second)
        store_u32(slot, pair)
    return pair


@part
def _enter(job, pair):
    store_u32(_slot(job, _of(job, pair, _FIRST), _of(job, pair, _SECOND)), pair)


@part
def _forget_pairs(job):
    put(job, N_PAIRS, 0)
    put(job, N_HEAP, 0)
    for slot in range(get(job, N_PAIR_SLOTS)):
        store_u32(get(job, PAIR_SLOTS) + 4 * slot, NONE)


@part
def _keep_frequent(job):
    """Renumber the pairs that are frequent, and drop the others."""
    n_all = get(job, N_PAIRS)
    _forget_pairs(job)
    for pair in range(n_all):
        if _of(job, pair, _COUNT) >= get(job, THRESHOLD):
            kept = get(job, N_PAIRS)
            _move(job, pair, kept)
            _enter(job, kept)
            put(job, N_PAIRS, kept + 1)


@compiled("void(int64)")
def enter_pairs(job):
    """Fill a new hash table with the pairs there are."""
    for slot in range(get(job, N_PAIR_SLOTS)):
        store_u32(get(job, PAIR_SLOTS) + 4 * slot, NONE)
    for pair in range(get(job, N_PAIRS)):
        _enter(job, pair)


# The heap: the most frequent pair first, of equally frequent ones the greatest byte strings.


@part
def _most_frequent(job):
    """The pair at the top, once its count is up to date; -1 where there is none as frequent as the threshold."""
    heap = get(job, HEAP)
    while get(job, N_HEAP):
        pair = load_i64(heap)
        count = _of(job, pair, _COUNT)
        if count < get(job, THRESHOLD):
            _pop(job)
        elif count == load_i64(heap + 8):
            return pair
        else:
            _sift_down(job, pair, count)
    return -1


@part
def _pop(job):
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
        if 2 * i + 2 < n_heap:
            if _comes_before(job, load_i64(child + 16), load_i64(child + 24), load_i64(child), load_i64(child + 8)):
                side = 1
        child += 16 * side
        if not _comes_before(job, load_i64(child), load_i64(child + 8), pair, count):
            break
        _put_entry(heap, i, load_i64(child), load_i64(child + 8))
        i = 2 * i + 1 + side
    _put_entry(heap, i, pair, count)


@part
def _push(job, pair):
    heap, i = get(job, HEAP), get(job, N_HEAP)
    count = _of(job, pair, _COUNT)
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
    first, other_first = _of(job, pair, _FIRST), _of(job, other, _FIRST)
    second, other_second = _of(job, pair, _SECOND), _of(job, other, _SECOND)
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
    length, other_length = _token_length(job, token), _token_length(job, other)
    start = get(job, TOKEN_BYTES) + _token_start(job, token)
    other_start = get(job, TOKEN_BYTES) + _token_start(job, other)
    for i in range(min(length, other_length)):
        difference = load_u8(start + i) - load_u8(other_start + i)
        if difference:
            return difference
    return length - other_length


@part
def _token_start(job, token):
    return load_i64(get(job, TOKEN_STARTS) + 8 * token)


@part
def _token_length(job, token):
    return _token_start(job, token + 1) - _token_start(job, token)


@part
def _add_token(job, new, first, second):
    end = get(job, TOKEN_BYTES) + _token_start(job, new)
    n_bytes = 0
    for token in (first, second):
        start = get(job, TOKEN_BYTES) + _token_start(job, token)
        for i in range(_token_length(job, token)):
            store_u8(end + n_bytes, load_u8(start + i))
            n_bytes += 1
    store_i64(get(job, TOKEN_STARTS) + 8 * (new + 1), _token_start(job, new) + n_bytes)
    prefix = 0
    for i in range(8):
        prefix = prefix << 8 | (load_u8(end + i) if i < n_bytes else 0)
    store_i64(get(job, TOKEN_PREFIXES) + 8 * new, prefix)
