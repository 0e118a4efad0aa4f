"""Merging the bytes of one pre-token, compiled: the lowest rank first and, where ranks are equal, from left to right.

Twins of `merge_by_scanning` and `merge_by_place` in bpe_merging.py. The id that a pair makes is its rank, so merges that
become possible by a merge always come after it.

Ranks of pairs of bytes are a table of 256 x 256 uint32. All other pairs are in a hash table of uint64: first id, second
id and merged id, of 20, 20 and 24 bits; 0 is an empty slot.
"""

import numpy as np

from napkin.tokenizer.compiled.intrinsics import (
    leading_zeros,
    least_of_16,
    load_u8,
    load_u32,
    load_u64,
    set_bits,
    store_u32,
    store_u64,
    trailing_zeros,
)
from napkin.tokenizer.compiled.jobs import (
    BYTE_PAIRS,
    N_PAIR_SLOTS,
    PAIRS,
    PAIRS_SHIFT,
    PLACES,
    RANK_BITS,
    RANKS,
    SHORT_IDS,
    SHORT_RANKS,
    VOCABULARY,
    get,
)
from napkin.tokenizer.compiled.machine_code import compiled, part

NEVER = 0xFFFFFFFF
# A set of places is one 64-bit word.
SHORT = 64
# Ids of the two halves of a pair take 20 bits each.
LARGEST_VOCABULARY = 2**20

_ONE = np.uint64(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@part
def merge_short(job, text, n_bytes):
    """Ids of the at most SHORT bytes at `text`, put at SHORT_IDS; returns their number.

    Bit i of `alive` says that a token begins at byte i; `ranks` holds, for each token that can be merged with the next,
    rank and place in one number, so that the least of them is the merge to make.
    """
    ids, ranks = get(job, SHORT_IDS), get(job, SHORT_RANKS)
    byte_pairs = get(job, BYTE_PAIRS)
    store_u32(ids, load_u8(text))
    for i in range(1, n_bytes):
        store_u32(ids + 4 * i, load_u8(text + i))
        rank = load_u32(byte_pairs + 4 * (load_u8(text + i - 1) << 8 | load_u8(text + i)))
        store_u32(ranks + 4 * (i - 1), NEVER if rank == NEVER else rank << 6 | (i - 1))
    # Ranks are read 16 at a time.
    for i in range(n_bytes - 1, (n_bytes + 14) & ~15):
        store_u32(ranks + 4 * i, NEVER)
    alive = ~np.uint64(0) >> np.uint64(64 - n_bytes)
    while True:
        best = NEVER
        for i in range(0, n_bytes - 1, 16):
            best = min(best, least_of_16(ranks + 4 * i))
        if best == NEVER:
            break
        i, merged = best & 63, best >> 6
        later = alive & (~_ONE << np.uint64(i))
        gone = trailing_zeros(later)
        store_u32(ids + 4 * i, merged)
        store_u32(ranks + 4 * gone, NEVER)
        alive &= ~(_ONE << np.uint64(gone))
        later &= later - _ONE
        rank = NEVER
        if later:
            rank = _rank(job, merged, load_u32(ids + 4 * trailing_zeros(later)))
        store_u32(ranks + 4 * i, NEVER if rank == NEVER else rank << 6 | i)
        earlier = alive & ((_ONE << np.uint64(i)) - _ONE)
        if earlier:
            before = 63 - leading_zeros(earlier)
            rank = _rank(job, load_u32(ids + 4 * before), merged)
            store_u32(ranks + 4 * before, NEVER if rank == NEVER else rank << 6 | before)
    n_ids = set_bits(alive)
    for k in range(n_ids):
        store_u32(ids + 4 * k, load_u32(ids + 4 * trailing_zeros(alive)))
        alive &= alive - _ONE
    return n_ids


@part
def merge_long(job, text, n_bytes, out):
    """Ids of the bytes at `text`, of which there are at most LONG_ROOM, put at `out` as uint32; returns their number.

    A place is a byte at which a token begins. PLACES holds a record a place, six uint32: the token, the next token's
    place, the place before, the rank of the pair that the token and the next one make, and the places before and after
    it in the list of that rank, which is in order. RANKS holds the first and the last place of each rank, RANK_BITS a
    bit for each rank that may have places. All lists are empty before and after.
    """
    places = get(job, PLACES)
    byte_pairs = get(job, BYTE_PAIRS)
    for i in range(n_bytes):
        _set(places, i, _TOKEN, load_u8(text + i))
        _set(places, i, _NEXT, i + 1)
        _set(places, i, _BEFORE, i - 1)
        _set(places, i, _RANK, NEVER)
    for i in range(n_bytes - 1):
        _note(job, places, i, load_u32(byte_pairs + 4 * (load_u8(text + i) << 8 | load_u8(text + i + 1))))
    bits = get(job, RANK_BITS)
    for word in range((get(job, VOCABULARY) >> 6) + 1):
        # A merge makes possible only later ones, of which some may be in this word.
        while load_u64(bits + 8 * word):
            rank = (word << 6) + trailing_zeros(load_u64(bits + 8 * word))
            store_u64(bits + 8 * word, load_u64(bits + 8 * word) & (load_u64(bits + 8 * word) - _ONE))
            _merge_all(job, places, n_bytes, rank)
    n_ids, i = 0, 0
    while i < n_bytes:
        store_u32(out + 4 * n_ids, _get(places, i, _TOKEN))
        n_ids += 1
        i = _get(places, i, _NEXT)
    return n_ids


_TOKEN, _NEXT, _BEFORE, _RANK, _LIST_NEXT, _LIST_BEFORE = range(6)
_NOWHERE = 0xFFFFFFFF


@part
def _merge_all(job, places, n_bytes, rank):
    ranks = get(job, RANKS)
    while True:
        i = load_u32(ranks + 8 * rank)
        if i == _NOWHERE:
            break
        gone = _get(places, i, _NEXT)
        before, following = _get(places, i, _BEFORE), _get(places, gone, _NEXT)
        _forget(job, places, i)
        _forget(job, places, gone)
        _set(places, i, _TOKEN, rank)
        _set(places, i, _NEXT, following)
        if before != _NOWHERE:
            _forget(job, places, before)
            _note(job, places, before, _rank(job, _get(places, before, _TOKEN), rank))
        if following < n_bytes:
            _set(places, following, _BEFORE, i)
            _note(job, places, i, _rank(job, rank, _get(places, following, _TOKEN)))


@part
def _note(job, places, i, rank):
    """Put a place at the end of the list of its rank."""
    if rank == NEVER:
        return
    ranks, bits = get(job, RANKS) + 8 * rank, get(job, RANK_BITS) + 8 * (rank >> 6)
    last = load_u32(ranks + 4)
    if load_u32(ranks) == _NOWHERE:
        store_u32(ranks, i)
        store_u64(bits, load_u64(bits) | _ONE << np.uint64(rank & 63))
    else:
        _set(places, last, _LIST_NEXT, i)
    store_u32(ranks + 4, i)
    _set(places, i, _RANK, rank)
    _set(places, i, _LIST_BEFORE, last)
    _set(places, i, _LIST_NEXT, _NOWHERE)


@part
def _forget(job, places, i):
    """Take a place out of its list, if it is in one."""
    rank = _get(places, i, _RANK)
    if rank == NEVER:
        return
    ranks = get(job, RANKS) + 8 * rank
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


@part
def _get(places, i, field):
    return load_u32(places + 24 * i + 4 * field)


@part
def _set(places, i, field, value):
    store_u32(places + 24 * i + 4 * field, value)


@part
def _rank(job, first, second):
    """The id that two tokens make; NEVER where they make none."""
    if first < 256 and second < 256:
        return load_u32(get(job, BYTE_PAIRS) + 4 * (first << 8 | second))
    pairs, mask = get(job, PAIRS), get(job, N_PAIR_SLOTS) - 1
    key = first << 20 | second
    slot = _slot_of(key, get(job, PAIRS_SHIFT))
    while True:
        entry = load_u64(pairs + 8 * slot)
        if entry >> _MERGED_BITS == np.uint64(key):
            return np.int64(entry & _MERGED)
        if entry == _EMPTY:
            return NEVER
        slot = (slot + 1) & mask


_EMPTY, _MERGED_BITS, _MERGED = np.uint64(0), np.uint64(24), np.uint64(2**24 - 1)


@part
def _slot_of(key, shift):
    return np.int64((np.uint64(key) * _GOLDEN) >> np.uint64(shift))


@compiled
def fill_pairs(merges, byte_pairs, pairs, shift):
    """Put merges, int64 of shape [n, 2] of which merge i makes id 256 + i, into uint32[65536] and uint64[n_slots].

    `byte_pairs` comes filled with NEVER, `pairs` with zeros and more than twice as long as there are merges; `shift` is
    64 less the bits of a slot's number. Plain twin: a dict.
    """
    mask = len(pairs) - 1
    for i in range(len(merges)):
        first, second = merges[i, 0], merges[i, 1]
        if first < 256 and second < 256:
            byte_pairs[first << 8 | second] = 256 + i
            continue
        key = first << 20 | second
        slot = _slot_of(key, shift)
        while pairs[slot] != _EMPTY:
            slot = (slot + 1) & mask
        pairs[slot] = np.uint64(key) << _MERGED_BITS | np.uint64(256 + i)
