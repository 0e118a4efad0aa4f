"""Learning merges from counted words, compiled. Plain twin: `learn_merges` in bpe_training.py.

A word is a row of tokens. Each pair of neighbours that is frequent enough has its count, the list of the words it
occurs in, and a place in a heap from which the most frequent comes. Merging a pair rewrites the words of its list. All
places of a pair arise while the later of its two tokens is made, so its list is complete then and from then on its
count only falls: the heap's entry is lowered when it comes to the top out of date, and a list may name words that no
longer hold the pair.

Pairs rarer than THRESHOLD have none of this: most are rare and never merged. Where all others are used up, the words
are gone through again with a lower threshold.

The fields of the job, pairs and heap are in pairs.py.
"""

from napkin.tokenizer.compiled.intrinsics import load_i64, load_u32, store_i64, store_u32
from napkin.tokenizer.compiled.jobs import DONE, get, put
from napkin.tokenizer.compiled.machine_code import compiled, part
from napkin.tokenizer.compiled.pairs import (
    BEFORE,
    BEHIND,
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
    N_NOTES,
    N_PAIRS,
    N_WORDS,
    NONE,
    NOTES,
    NOTES_ROOM,
    PAIRS_ROOM,
    RENUMBERED,
    SECOND,
    STARTS,
    SYMBOLS,
    THRESHOLD,
    TOKEN_BYTES_ROOM,
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

# What the functions return besides DONE.
NEEDS_PAIRS, NEEDS_LISTS, NEEDS_NOTES, NEEDS_TOKEN_BYTES, EXHAUSTED = range(1, 6)


@compiled("int64(int64, int64)")
def learn(job, until):
    """Learn merges until there are `until` of them.

    Returns DONE, what there is too little of, or EXHAUSTED, where no pair as frequent as the threshold is left. In all
    but the first case it has stopped between two merges.
    """
    while get(job, N_MERGES) < until:
        pair = most_frequent(job)
        if pair < 0:
            return EXHAUSTED
        status = _has_room(job, pair)
        if status != DONE:
            return status
        pop(job)
        _merge(job, pair)
    return DONE


@compiled("int64(int64)")
def index_pairs(job):
    """Count the pairs of all words and make lists and heap of those as frequent as the threshold.

    Returns DONE, or what there is too little of: then it must be called again.
    """
    forget_pairs(job)
    for word in range(get(job, N_WORDS)):
        count = load_i64(get(job, COUNTS) + 8 * word)
        start = get(job, SYMBOLS) + 4 * load_u32(get(job, STARTS) + 4 * word)
        for i in range(load_u32(get(job, LENGTHS) + 4 * word) - 1):
            pair = find_or_add_pair(job, load_u32(start + 4 * i), load_u32(start + 4 * i + 4))
            if pair < 0:
                return NEEDS_PAIRS
            change_pair_field(job, pair, COUNT, count)
            if pair_field(job, pair, LAST_WORD) != word:
                set_pair_field(job, pair, LAST_WORD, word)
                change_pair_field(job, pair, LIST_LENGTH, 1)
    keep_frequent_pairs(job)
    used = 0
    for pair in range(get(job, N_PAIRS)):
        set_pair_field(job, pair, LIST, used)
        used += pair_field(job, pair, LIST_LENGTH)
        set_pair_field(job, pair, LIST_LENGTH, 0)
        set_pair_field(job, pair, LAST_WORD, -1)
    if used > get(job, LISTS_ROOM):
        put(job, LISTS_USED, used)
        return NEEDS_LISTS
    put(job, LISTS_USED, used)
    for word in range(get(job, N_WORDS)):
        start = get(job, SYMBOLS) + 4 * load_u32(get(job, STARTS) + 4 * word)
        for i in range(load_u32(get(job, LENGTHS) + 4 * word) - 1):
            pair = find_pair(job, load_u32(start + 4 * i), load_u32(start + 4 * i + 4))
            if pair >= 0 and pair_field(job, pair, LAST_WORD) != word:
                set_pair_field(job, pair, LAST_WORD, word)
                append_word(job, pair, word)
    for pair in range(get(job, N_PAIRS)):
        push(job, pair)
    return DONE


@part
def _has_room(job, pair):
    """Whether there is room for all that merging a pair may add."""
    words, n_symbols = get(job, LISTS) + 4 * pair_field(job, pair, LIST), 0
    for i in range(pair_field(job, pair, LIST_LENGTH)):
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
    n_bytes = token_length(job, pair_field(job, pair, FIRST)) + token_length(job, pair_field(job, pair, SECOND))
    if token_start(job, 256 + get(job, N_MERGES)) + n_bytes > get(job, TOKEN_BYTES_ROOM):
        return NEEDS_TOKEN_BYTES
    return DONE


@part
def _merge(job, pair):
    """Make a new token of a pair in all words that hold it."""
    first, second = pair_field(job, pair, FIRST), pair_field(job, pair, SECOND)
    number = get(job, N_MERGES)
    new = 256 + number
    store_i64(get(job, MERGES) + 16 * number, first)
    store_i64(get(job, MERGES) + 16 * number + 8, second)
    put(job, N_MERGES, number + 1)
    add_token(job, new, first, second)
    base = get(job, N_PAIRS)
    put(job, N_NOTES, 0)
    words = get(job, LISTS) + 4 * pair_field(job, pair, LIST)
    for i in range(pair_field(job, pair, LIST_LENGTH)):
        _rewrite(job, load_u32(words + 4 * i), first, second, new)
    set_pair_field(job, pair, COUNT, 0)
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
    """Note a place of a pair with the new token, whose number, NONE until it has one, is at the address `number`."""
    pair = load_u32(number)
    if pair == NONE:
        pair = new_pair(job, first, second)
        store_u32(number, pair)
    change_pair_field(job, pair, COUNT, count)
    if pair_field(job, pair, LAST_WORD) != word:
        set_pair_field(job, pair, LAST_WORD, word)
        change_pair_field(job, pair, LIST_LENGTH, 1)
        note = get(job, NOTES) + 8 * get(job, N_NOTES)
        store_u32(note, pair)
        store_u32(note + 4, word)
        put(job, N_NOTES, get(job, N_NOTES) + 1)


@part
def _take_from_pairs_gone(job, base, first, second, new):
    """Where a pair with the new token arose, one with a half of it was before."""
    for pair in range(base, get(job, N_PAIRS)):
        before, behind = pair_field(job, pair, FIRST), pair_field(job, pair, SECOND)
        if behind == new:
            store_u32(get(job, BEFORE) + 4 * before, NONE)
        else:
            store_u32(get(job, BEHIND) + 4 * behind, NONE)
        gone_first = second if before == new else before
        gone_second = first if behind == new else behind
        if gone_first == first and gone_second == second:
            continue
        gone = find_pair(job, gone_first, gone_second)
        if gone >= 0:
            change_pair_field(job, gone, COUNT, -pair_field(job, pair, COUNT))


@part
def _keep_arisen(job, base):
    """Of the pairs from `base` on, give those a list and a place in the heap that are frequent, and drop the others."""
    n_pairs, used, threshold = base, get(job, LISTS_USED), get(job, THRESHOLD)
    for pair in range(base, get(job, N_PAIRS)):
        renumbered = NONE
        if pair_field(job, pair, COUNT) >= threshold:
            renumbered = n_pairs
            move_pair(job, pair, n_pairs)
            set_pair_field(job, n_pairs, LIST, used)
            used += pair_field(job, n_pairs, LIST_LENGTH)
            set_pair_field(job, n_pairs, LIST_LENGTH, 0)
            n_pairs += 1
        store_u32(get(job, RENUMBERED) + 4 * (pair - base), renumbered)
    put(job, N_PAIRS, n_pairs)
    put(job, LISTS_USED, used)
    for i in range(get(job, N_NOTES)):
        note = get(job, NOTES) + 8 * i
        pair = load_u32(get(job, RENUMBERED) + 4 * (load_u32(note) - base))
        if pair != NONE:
            append_word(job, pair, load_u32(note + 4))
    for pair in range(base, n_pairs):
        enter_pair(job, pair)
        push(job, pair)
