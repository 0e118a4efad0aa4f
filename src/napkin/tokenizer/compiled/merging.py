"""Merging the bytes of one pre-token, compiled: the lowest rank first and, where ranks are equal, from left to right.

Twins of `merge_by_scanning` and `merge_by_place` in bpe_merging.py. The id that a pair makes is its rank, so merges
that become possible by a merge always come after it.

Ranks of pairs of bytes are a table of 256 x 256 uint32. All other pairs are in a hash table of buckets of 8 uint64, a
line of the processor's cache: first id, second id and merged id, of 20, 20 and 24 bits; 0 is an empty slot. What a full
bucket has no room for is in the next.
"""

import numpy as np

from napkin.tokenizer.compiled.intrinsics import (
    find_in_bucket,
    leading_zeros,
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
    N_BUCKETS,
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
# Places of an id, or a rank, for each of them, with some before and behind.
SHORT_ROOM = SHORT + 10
# An id that is in no merge.
NO_ID = 2**20 - 1

_ONE = np.uint64(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@part
def merge_short(job, text, n_bytes):
    """Ids of the at most SHORT bytes at `text`, put at the first of the two places of SHORT_IDS; returns their number.

    Bit i of `alive` says that a token begins at byte i. `ranks` holds, for each token, the rank of the pair it makes
    with the next one and its own place in one number, so that the least of them is the merge to make. There is an id
    that makes no pair before the first token and after the last, so that no merge is a special case: what a word is
    like cannot be foretold, and a wrong guess of the processor costs more than a lookup.
    """
    ids, ranks = short_ids(job, 0), _short_ranks(job, 0)
    alive = _begin(job, text, n_bytes, ids, ranks)
    return _finish(job, n_bytes, ids, ranks, alive)


@part
def merge_two_short(job, text, n_bytes, other, other_bytes):
    """The same for two pre-tokens, put at both places; returns the number of ids of each.

    Merging waits for memory most of the time; two at once wait together.
    """
    ids, ranks = short_ids(job, 0), _short_ranks(job, 0)
    other_ids, other_ranks = short_ids(job, 1), _short_ranks(job, 1)
    alive = _begin(job, text, n_bytes, ids, ranks)
    other_alive = _begin(job, other, other_bytes, other_ids, other_ranks)
    while True:
        best, other_best = _least(ranks, n_bytes), _least(other_ranks, other_bytes)
        if best >= _NO_MERGE or other_best >= _NO_MERGE:
            break
        alive = _merge_best(job, ids, ranks, alive, best)
        other_alive = _merge_best(job, other_ids, other_ranks, other_alive, other_best)
    n_ids = _finish(job, n_bytes, ids, ranks, alive)
    return n_ids, _finish(job, other_bytes, other_ids, other_ranks, other_alive)


@part
def short_ids(job, which):
    """Where the ids of the first or the second of two short pre-tokens are put."""
    return get(job, SHORT_IDS) + 4 + 4 * SHORT_ROOM * which


@part
def _short_ranks(job, which):
    return get(job, SHORT_RANKS) + 4 + 4 * SHORT_ROOM * which


@part
def _begin(job, text, n_bytes, ids, ranks):
    """Put bytes and the ranks of their pairs; which tokens are alive."""
    byte_pairs = get(job, BYTE_PAIRS)
    store_u32(ids, load_u8(text))
    for i in range(1, n_bytes):
        store_u32(ids + 4 * i, load_u8(text + i))
        _set_rank(ranks, i - 1, load_u32(byte_pairs + 4 * (load_u8(text + i - 1) << 8 | load_u8(text + i))))
    for i in range(n_bytes - 1, n_bytes + 7):
        _set_rank(ranks, i, NEVER)
    return ~np.uint64(0) >> np.uint64(64 - n_bytes)


@part
def _least(ranks, n_bytes):
    best = _least_of_8(ranks)
    for i in range(8, n_bytes - 1, 8):
        best = min(best, _least_of_8(ranks + 4 * i))
    return best


@part
def _merge_best(job, ids, ranks, alive, best):
    """Make the merge of that rank and place; which tokens are alive then."""
    i, merged = best & 63, best >> 6
    later = alive & (~_ONE << np.uint64(i))
    gone = trailing_zeros(later)
    before = 63 - leading_zeros(alive & ((_ONE << np.uint64(i)) - _ONE))
    following = trailing_zeros(later & (later - _ONE))
    store_u32(ids + 4 * i, merged)
    _set_rank(ranks, gone, NEVER)
    _set_rank(ranks, i, _rank_of_made(job, merged, load_u32(ids + 4 * following)))
    _set_rank(ranks, before, _rank_of_made(job, load_u32(ids + 4 * before), merged))
    return alive & ~(_ONE << np.uint64(gone))


@part
def _finish(job, n_bytes, ids, ranks, alive):
    """Make all merges that are left and close the gaps; the number of ids."""
    while True:
        best = _least(ranks, n_bytes)
        if best >= _NO_MERGE:
            break
        alive = _merge_best(job, ids, ranks, alive, best)
    n_ids = set_bits(alive)
    for k in range(n_ids):
        store_u32(ids + 4 * k, load_u32(ids + 4 * trailing_zeros(alive)))
        alive &= alive - _ONE
    return n_ids


# What NEVER is as a rank with a place, whatever the place.
_NO_MERGE = (NEVER << 6) & NEVER


@part
def _set_rank(ranks, i, rank):
    store_u32(ranks + 4 * i, rank << 6 | (i & 63))


@part
def _least_of_8(ranks):
    # One by one: a vector could not be loaded before the stores just made have reached the cache.
    first = min(min(load_u32(ranks), load_u32(ranks + 4)), min(load_u32(ranks + 8), load_u32(ranks + 12)))
    second = min(min(load_u32(ranks + 16), load_u32(ranks + 20)), min(load_u32(ranks + 24), load_u32(ranks + 28)))
    return min(first, second)


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
    return _rank_of_made(job, first, second)


@part
def _rank_of_made(job, first, second):
    """The same where not both are bytes."""
    pairs, mask = get(job, PAIRS), get(job, N_BUCKETS) - 1
    key = first << 20 | second
    bucket = _bucket_of(key, get(job, PAIRS_SHIFT))
    while True:
        merged = find_in_bucket(pairs + 64 * bucket, key)
        # One branch, nearly always taken: with `or` there were two, and whether a pair merges cannot be foretold.
        if (merged != NEVER) | (load_u64(pairs + 64 * bucket + 56) == _EMPTY):
            return merged
        bucket = (bucket + 1) & mask


_EMPTY, _MERGED_BITS = np.uint64(0), np.uint64(24)


@part
def _bucket_of(key, shift):
    return np.int64((np.uint64(key) * _GOLDEN) >> np.uint64(shift))


@compiled("void(int64[:, ::1], uint32[::1], uint64[:, ::1], int64)")
def fill_pairs(merges, byte_pairs, pairs, shift):
    """Put merges, int64 of shape [n, 2] of which merge i makes id 256 + i, into uint32[65536] and uint64[n_buckets, 8].

    `byte_pairs` comes filled with NEVER, `pairs` with zeros and with room to spare; `shift` is 64 less the bits of a
    bucket's number. Plain twin: a dict.
    """
    mask = len(pairs) - 1
    for i in range(len(merges)):
        first, second = merges[i, 0], merges[i, 1]
        if first < 256 and second < 256:
            byte_pairs[first << 8 | second] = 256 + i
            continue
        key = first << 20 | second
        bucket = _bucket_of(key, shift)
        while pairs[bucket, 7] != _EMPTY:
            bucket = (bucket + 1) & mask
        slot = 0
        while pairs[bucket, slot] != _EMPTY:
            slot += 1
        pairs[bucket, slot] = np.uint64(key) << _MERGED_BITS | np.uint64(256 + i)
