"""Merging the bytes of one pre-token, compiled: lowest rank first; for equal ranks, from left to right.

The plain twins are `merge_by_scanning` and `merge_by_heap` in character_bpe.py. The id that a pair merges into is its
rank, which several pairs may share. A merge mostly enables merges of higher rank; where a token has a lower rank than
one of its parts, it does not.

Ranks of pairs of bytes are in a table of 256 x 256 uint32. All other pairs are in a hash table whose buckets are 8
uint64, one cache line: first id, second id and merged id, of 20, 20 and 24 bits; 0 is an empty slot. A full bucket
overflows into the next. The hash is keyed; see fields.py.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, inlined, jitted
from napkin.machine_code.pointers import (
    find_in_bucket,
    leading_zeros,
    least_of_16,
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    set_bits,
    store_i64,
    store_u32,
    store_u64,
    trailing_zeros,
)
from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba.characters import write_symbols
from napkin.tokenizer.numba.fields import get

NEVER = 0xFFFFFFFF
# So that a set of positions is one 64-bit word.
SHORT = 64
# Entries of an array of ids or ranks, one per position, with a margin on both sides.
SHORT_ROOM = SHORT + 18
# How many short pre-tokens are merged in turns.
LANES = 4
# An id that occurs in no merge.
NO_ID = 2**20 - 1

_ONE = np.uint64(1)


@inlined
def begin_short(state, lane, entry, text, n_bytes):
    """Begin merging the bytes at `text`, at most SHORT, for an entry, in a lane; or the symbols of its characters.

    Merging mostly waits for memory and for its own last step; several pre-tokens are merged in turns, one in each lane,
    so that these overlap. Bit i of `alive` is set if a token begins at symbol i. `ranks` holds for each token one
    number: the rank of the pair with the next token, then the token's position, so that the minimum is the merge to
    apply. An id that occurs in no merge is placed before the first token and after the last, so that no merge is a
    special case: branches here are unpredictable, and a misprediction costs more than a lookup.
    """
    ids, ranks = short_ids(state, lane), _short_ranks(state, lane)
    if get(state, fields.SYMBOLS):
        n_symbols = write_symbols(get(state, fields.SYMBOLS), text, n_bytes, ids, 4)
        for i in range(n_symbols - 1):
            _set_rank(ranks, i, _rank(state, load_u32(ids + 4 * i), load_u32(ids + 4 * i + 4)))
    else:
        n_symbols, byte_pairs = n_bytes, get(state, fields.BYTE_PAIRS)
        store_u32(ids, load_u8(text))
        for i in range(1, n_bytes):
            store_u32(ids + 4 * i, load_u8(text + i))
            _set_rank(ranks, i - 1, load_u32(byte_pairs + 4 * (load_u8(text + i - 1) << 8 | load_u8(text + i))))
    for i in range(n_symbols - 1, n_symbols + 15):
        store_u32(ranks + 4 * i, NEVER)
    store_i64(_lane(state, lane), n_symbols)
    store_u64(_lane(state, lane) + 8, ~np.uint64(0) >> np.uint64(64 - n_symbols))
    store_i64(_lane(state, lane) + 16, entry)


@inlined
def step_short(state, lane):
    """Apply the next merge in a lane. Returns 0, or if none is left the number of ids, which are at `short_ids`."""
    ids, ranks, n_symbols = short_ids(state, lane), _short_ranks(state, lane), load_i64(_lane(state, lane))
    best = least_of_16(ranks)
    for i in range(16, n_symbols - 1, 16):
        best = min(best, least_of_16(ranks + 4 * i))
    alive = load_u64(_lane(state, lane) + 8)
    if best < _NO_MERGE:
        i, merged = best & 63, best >> 6
        later = alive & (~_ONE << np.uint64(i))
        gone = trailing_zeros(later)
        before = 63 - leading_zeros(alive & ((_ONE << np.uint64(i)) - _ONE))
        following = trailing_zeros(later & (later - _ONE))
        store_u32(ids + 4 * i, merged)
        _set_rank(ranks, gone, NEVER)
        _set_rank(ranks, i, _rank_of_made(state, merged, load_u32(ids + 4 * following)))
        _set_rank(ranks, before, _rank_of_made(state, load_u32(ids + 4 * before), merged))
        store_u64(_lane(state, lane) + 8, alive & ~(_ONE << np.uint64(gone)))
        return 0
    n_ids = set_bits(alive)
    # Close the gaps.
    for k in range(n_ids):
        store_u32(ids + 4 * k, load_u32(ids + 4 * trailing_zeros(alive)))
        alive &= alive - _ONE
    return n_ids


@inlined
def end_short(state, lane):
    """Make a lane idle."""
    store_i64(_lane(state, lane), 0)


@inlined
def is_busy(state, lane):
    return load_i64(_lane(state, lane)) > 0


@inlined
def lane_entry(state, lane):
    """The entry that the ids of a lane are for."""
    return load_i64(_lane(state, lane) + 16)


@inlined
def short_ids(state, lane):
    """The address of the ids in a lane."""
    return get(state, fields.SHORT_IDS) + 4 + 4 * SHORT_ROOM * lane


@inlined
def _short_ranks(state, lane):
    return get(state, fields.SHORT_RANKS) + 4 + 4 * SHORT_ROOM * lane


@inlined
def _lane(state, lane):
    """The address of what a lane has: the number of symbols, 0 if it is idle; `alive`; and the entry."""
    return get(state, fields.SHORT_LANES) + 24 * lane


# NEVER combined with a position, in 32 bits; any value from here on is no merge.
_NO_MERGE = (NEVER << 6) & NEVER


@inlined
def _set_rank(ranks, i, rank):
    store_u32(ranks + 4 * i, rank << 6 | (i & 63))


@jitted
def merge_long(state, text, n_bytes, out):
    """Merge the bytes at `text`, at most LONG_ROOM, into uint32 ids at `out`; returns the number of ids.

    A position is a byte, or a symbol of a character, at which a token begins. PLACES holds a record of six uint32 per
    position: the token, the next and the previous token's position, the rank of the pair with the next token, and the
    next and previous position in the list of that rank, which is in order. RANKS holds the first and the last position
    of each rank, RANK_BITS a bit for each rank that may have positions. All lists are empty before and after the call.
    """
    places = get(state, fields.PLACES)
    length = n_bytes
    if get(state, fields.SYMBOLS):
        length = write_symbols(get(state, fields.SYMBOLS), text, n_bytes, places + 4 * _TOKEN, 24)
    else:
        for i in range(n_bytes):
            _set(places, i, _TOKEN, load_u8(text + i))
    for i in range(length):
        _set(places, i, _NEXT, i + 1)
        _set(places, i, _BEFORE, i - 1)
        _set(places, i, _RANK, NEVER)
    for i in range(length - 1):
        _note(state, places, i, _rank(state, _get(places, i, _TOKEN), _get(places, i + 1, _TOKEN)))
    bits, word = get(state, fields.RANK_BITS), 0
    while word <= get(state, fields.VOCABULARY) >> 6:
        if load_u64(bits + 8 * word):
            rank = (word << 6) + trailing_zeros(load_u64(bits + 8 * word))
            store_u64(bits + 8 * word, load_u64(bits + 8 * word) & (load_u64(bits + 8 * word) - _ONE))
            # What it enables may be in this word, or in one before it.
            word = min(word, _merge_all(state, places, length, rank) >> 6)
        else:
            word += 1
    n_ids, i = 0, 0
    while i < length:
        store_u32(out + 4 * n_ids, _get(places, i, _TOKEN))
        n_ids += 1
        i = _get(places, i, _NEXT)
    return n_ids


_TOKEN, _NEXT, _BEFORE, _RANK, _LIST_NEXT, _LIST_BEFORE = range(6)
_NOWHERE = 0xFFFFFFFF


@jitted
def _merge_all(state, places, length, rank):
    """Merge at the positions of a rank until none is left, or one of lower rank is enabled, which is returned."""
    ranks, lowest = get(state, fields.RANKS), np.int64(NEVER)
    while lowest > rank:
        i = load_u32(ranks + 8 * rank)
        if i == _NOWHERE:
            return lowest
        gone = _get(places, i, _NEXT)
        before, following = _get(places, i, _BEFORE), _get(places, gone, _NEXT)
        _forget(state, places, i)
        _forget(state, places, gone)
        _set(places, i, _TOKEN, rank)
        _set(places, i, _NEXT, following)
        if before != _NOWHERE:
            _forget(state, places, before)
            found = _rank(state, _get(places, before, _TOKEN), rank)
            _note(state, places, before, found)
            lowest = min(lowest, found)
        if following < length:
            _set(places, following, _BEFORE, i)
            found = _rank(state, rank, _get(places, following, _TOKEN))
            _note(state, places, i, found)
            lowest = min(lowest, found)
    _announce(state, rank)
    return lowest


@jitted
def _note(state, places, i, rank):
    """Enter a position into the list of its rank, nearly always at its end."""
    if rank == NEVER:
        return
    ranks = get(state, fields.RANKS) + 8 * rank
    before, following = load_u32(ranks + 4), _NOWHERE
    while before != _NOWHERE and before > i:
        before, following = _get(places, before, _LIST_BEFORE), before
    if before == _NOWHERE:
        store_u32(ranks, i)
    else:
        _set(places, before, _LIST_NEXT, i)
    if following == _NOWHERE:
        store_u32(ranks + 4, i)
    else:
        _set(places, following, _LIST_BEFORE, i)
    _set(places, i, _RANK, rank)
    _set(places, i, _LIST_BEFORE, before)
    _set(places, i, _LIST_NEXT, following)
    _announce(state, rank)


@jitted
def _announce(state, rank):
    """Set the bit of a rank, which may have positions."""
    bits = get(state, fields.RANK_BITS) + 8 * (rank >> 6)
    store_u64(bits, load_u64(bits) | _ONE << np.uint64(rank & 63))


@jitted
def _forget(state, places, i):
    """Remove a position from its list, if it is in one."""
    rank = _get(places, i, _RANK)
    if rank == NEVER:
        return
    ranks = get(state, fields.RANKS) + 8 * rank
    before, following = _get(places, i, _LIST_BEFORE), _get(places, i, _LIST_NEXT)
    if before == _NOWHERE:
        store_u32(ranks, following)
    else:
        _set(places, before, _LIST_NEXT, following)
    if following == _NOWHERE:
        store_u32(ranks + 4, before)
    else:
        _set(places, following, _LIST_BEFORE, before)
    _set(places, i, _RANK, NEVER)


@jitted
def _get(places, i, field):
    return load_u32(places + 24 * i + 4 * field)


@jitted
def _set(places, i, field, value):
    store_u32(places + 24 * i + 4 * field, value)


@jitted
def _rank(state, first, second):
    """The id that two tokens merge into; NEVER if there is no such merge."""
    if first < 256 and second < 256:
        return load_u32(get(state, fields.BYTE_PAIRS) + 4 * (first << 8 | second))
    return _rank_of_made(state, first, second)


@inlined
def _rank_of_made(state, first, second):
    """The rank of a pair that is not two bytes."""
    pairs, mask = get(state, fields.PAIRS), get(state, fields.N_BUCKETS) - 1
    key = first << 20 | second
    bucket = _bucket_of(key, get(state, fields.HASH_MULTIPLIER), get(state, fields.PAIRS_SHIFT))
    while True:
        merged = find_in_bucket(pairs + 64 * bucket, key)
        # One branch, nearly always taken. `or` would be two, one of them unpredictable: whether the pair merges.
        if (merged != NEVER) | (load_u64(pairs + 64 * bucket + 56) == _EMPTY):
            return merged
        bucket = (bucket + 1) & mask


_EMPTY, _MERGED_BITS = np.uint64(0), np.uint64(24)


@inlined
def _bucket_of(key, multiplier, shift):
    return np.int64((np.uint64(key) * np.uint64(multiplier)) >> np.uint64(shift))


@CompiledFunction
def fill_pairs(merges, n_merges, byte_pairs, pairs, n_buckets, multiplier, shift):
    """Enter merges, int64 of shape [n, 3], two ids and the one they make, into uint32[65536] and uint64[n_buckets, 8].

    The arrays are given by their addresses. `byte_pairs` is filled with NEVER before the call, `pairs` with zeros, and
    must have room to spare; `shift` is 64 minus the number of bits of a bucket index. Plain twin: a dict.
    """
    for i in range(n_merges):
        first, second, made = load_i64(merges + 24 * i), load_i64(merges + 24 * i + 8), load_i64(merges + 24 * i + 16)
        if first < 256 and second < 256:
            store_u32(byte_pairs + 4 * (first << 8 | second), made)
            continue
        key = first << 20 | second
        bucket = _bucket_of(key, multiplier, shift)
        while load_u64(pairs + 64 * bucket + 56) != _EMPTY:
            bucket = (bucket + 1) & (n_buckets - 1)
        slot = pairs + 64 * bucket
        while load_u64(slot) != _EMPTY:
            slot += 8
        store_u64(slot, np.uint64(key) << _MERGED_BITS | np.uint64(made))
