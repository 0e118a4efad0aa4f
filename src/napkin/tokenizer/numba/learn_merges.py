"""Learning merges from counted words, compiled. Plain twin: `learn_merges` in bpe_training.py.

A word is a sequence of tokens. Each pair of adjacent tokens that is frequent enough has a count, a list of the words it
occurs in, and an entry in a heap whose top is the most frequent pair. Merging a pair rewrites the words of its list.
All occurrences of a pair appear while the later of its two tokens is created. So its list is complete from then on, and
its count only falls: an outdated heap entry is lowered when it reaches the top, and a list may contain words in which
the pair no longer occurs.

Pairs rarer than THRESHOLD are not tracked: most are rare and never merged. When no tracked pair is left, the words are
indexed again with a lower threshold.

The fields of the state, the pairs and the heap are in pair_table.py.
"""

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import load_i64, load_u32, store_i64, store_u32
from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba.fields import get, put
from napkin.tokenizer.numba.pair_table import (
    AFTER,
    BEFORE,
    COUNT,
    COUNTS,
    FIRST,
    LAST_WORD,
    LENGTHS,
    LIST,
    LIST_LENGTH,
    LISTS,
    LISTS_ROOM,
    LISTS_USED,
    MERGES,
    N_MERGES,
    N_OCCURRENCES,
    N_PAIRS,
    N_WORDS,
    NEW_NUMBERS,
    NONE,
    OCCURRENCES,
    OCCURRENCES_ROOM,
    PAIRS_ROOM,
    SECOND,
    STARTS,
    THRESHOLD,
    TOKEN_BYTES_ROOM,
    TOKENS,
    add_token,
    append_word,
    change_pair_field,
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
    if used > get(state, LISTS_ROOM):
        put(state, LISTS_USED, used)
        return NEEDS_LISTS
    put(state, LISTS_USED, used)
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
