"""Text to ids, compiled: scan, look up, and merge what is seen for the first time.

Plain twin: `apply_merges` of each pre-token of `PreTokenizer.split`, document by document.
"""

import numpy as np

from napkin.tokenizer.compiled.cache import INLINE_BYTES, INLINE_IDS, fill_queue, find
from napkin.tokenizer.compiled.intrinsics import (
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    store_i64,
    store_u8,
    store_u32,
    store_u64,
)
from napkin.tokenizer.compiled.jobs import (
    DOCUMENT,
    DOCUMENT_ENDS,
    DONE,
    ENDS,
    ENTRIES_ROOM,
    IDS,
    IDS_ROOM,
    KEYS,
    LONG_BYTES,
    LONG_BYTES_ROOM,
    LONG_BYTES_USED,
    LONG_IDS,
    LONG_IDS_ROOM,
    LONG_IDS_USED,
    LONG_ROOM,
    N_DOCUMENTS,
    N_ENTRIES,
    N_IDS,
    N_IDS_BY_DOCUMENT,
    N_NEW,
    NEEDED_BYTES,
    NEEDS_IDS,
    NEEDS_LONG_ROOM,
    NEEDS_TABLE,
    NEW,
    POSITION,
    QUEUE,
    TEXT,
    get,
    put,
)
from napkin.tokenizer.compiled.machine_code import compiled, part
from napkin.tokenizer.compiled.merging import SHORT, merge_long, merge_short, merge_two_short, short_ids
from napkin.tokenizer.compiled.scanners import MARGIN

# Ids are stored four at a time, whether there are as many or not.
IDS_MARGIN = 4


@compiled("int64(int64)")
def encode_documents(job):
    """Encode documents from DOCUMENT and POSITION on until they end, or until there is no room.

    Returns DONE; NEEDS_TABLE, where the table or what goes with it must be enlarged or emptied; NEEDS_IDS, where ids
    must be taken away, or room be made for as many as the next pre-token has bytes; or NEEDS_LONG_ROOM, where that is
    too long to be merged. The last two leave its length in NEEDED_BYTES.
    """
    while get(job, DOCUMENT) < get(job, N_DOCUMENTS):
        document = get(job, DOCUMENT)
        stop = load_i64(get(job, DOCUMENT_ENDS) + 8 * document)
        before = get(job, N_IDS)
        status = _encode_until(job, stop)
        if get(job, N_IDS_BY_DOCUMENT):
            total = get(job, N_IDS_BY_DOCUMENT) + 8 * document
            store_i64(total, load_i64(total) + get(job, N_IDS) - before)
        if status != DONE:
            return status
        put(job, DOCUMENT, document + 1)
    return DONE


@part
def _encode_until(job, stop):
    while get(job, POSITION) < stop:
        if get(job, N_ENTRIES) + QUEUE + MARGIN > get(job, ENTRIES_ROOM):
            return NEEDS_TABLE
        status = _encode_queue(job, fill_queue(job, stop))
        if status != DONE:
            return status
    return DONE


@part
def _encode_queue(job, count):
    """Encode the `count` pre-tokens from POSITION on whose ends are in ENDS, or as many as there is room for.

    In three rounds, so that in each many wait for memory together: find all, merge the new ones, write all ids.
    """
    found = _find_all(job, count)
    status = DONE if found == count else NEEDS_TABLE
    _merge_new(job)
    written = _write_ids(job, found)
    return status if written == DONE else written


@part
def _find_all(job, count):
    """Put the address of each pre-token's entry in place of its key, 0 for one that is too long; how many were done.

    New pre-tokens get an entry, which has its ids later, and are noted in NEW.
    """
    text, ends, keys, new = get(job, TEXT), get(job, ENDS), get(job, KEYS), get(job, NEW)
    start, n_new = get(job, POSITION), 0
    n_entries, long_used = get(job, N_ENTRIES), get(job, LONG_BYTES_USED)
    # As many ids as bytes, if nothing merges.
    ids_room = get(job, LONG_IDS_ROOM) - get(job, LONG_IDS_USED)
    done = count
    for i in range(count):
        end = load_i64(ends + 8 * i)
        low, high = load_u64(keys + 16 * i), load_u64(keys + 16 * i + 8)
        entry = 0
        if high != _ZERO:
            entry = find(job, text, start, low, high)
            if load_u64(entry + 8) == _ZERO:
                n_bytes = end - start
                ids_room -= n_bytes
                if ids_room < 0 or (n_bytes > INLINE_BYTES and long_used + n_bytes > get(job, LONG_BYTES_ROOM)):
                    done = i
                    break
                if n_bytes > INLINE_BYTES:
                    for k in range(n_bytes):
                        store_u8(get(job, LONG_BYTES) + long_used + k, load_u8(text + start + k))
                    high |= np.uint64(long_used)
                    long_used += n_bytes
                store_u64(entry, low)
                store_u64(entry + 8, high)
                store_i64(new + 24 * n_new, entry)
                store_i64(new + 24 * n_new + 8, text + start)
                store_i64(new + 24 * n_new + 16, n_bytes)
                n_new += 1
        store_i64(keys + 16 * i, entry)
        start = end
    put(job, N_NEW, n_new)
    put(job, N_ENTRIES, n_entries + n_new)
    put(job, LONG_BYTES_USED, long_used)
    return done


@part
def _merge_new(job):
    """Work out the ids of the pre-tokens in NEW: short ones two at a time, as they come."""
    new, waiting = get(job, NEW), -1
    for i in range(get(job, N_NEW)):
        text, n_bytes = load_i64(new + 24 * i + 8), load_i64(new + 24 * i + 16)
        if n_bytes > SHORT:
            address = get(job, LONG_IDS) + 4 * get(job, LONG_IDS_USED)
            _remember(job, load_i64(new + 24 * i), address, merge_long(job, text, n_bytes, address))
        elif waiting < 0:
            waiting = i
        else:
            other = new + 24 * waiting
            n_ids, n_other = merge_two_short(job, text, n_bytes, load_i64(other + 8), load_i64(other + 16))
            _remember(job, load_i64(new + 24 * i), short_ids(job, 0), n_ids)
            _remember(job, load_i64(other), short_ids(job, 1), n_other)
            waiting = -1
    if waiting >= 0:
        last = new + 24 * waiting
        n_ids = merge_short(job, load_i64(last + 8), load_i64(last + 16))
        _remember(job, load_i64(last), short_ids(job, 0), n_ids)


@part
def _remember(job, entry, ids, n_ids):
    """Put ids into an entry, or where there are too many for it beside the table."""
    if n_ids <= INLINE_IDS:
        # What stands beyond the last id is copied along and overwritten by what follows.
        store_u64(entry + 16, np.uint64(n_ids | load_u32(ids) << 8) | load_u64(ids + 4) << _32)
        store_u64(entry + 24, load_u64(ids + 8))
        return
    place = get(job, LONG_IDS_USED)
    for k in range(n_ids):
        store_u32(get(job, LONG_IDS) + 4 * (place + k), load_u32(ids + 4 * k))
    put(job, LONG_IDS_USED, place + n_ids)
    store_u64(entry + 16, np.uint64(n_ids) | np.uint64(place) << _32)


@part
def _write_ids(job, count):
    """Write the ids of the queue, and leave POSITION behind the last pre-token for which there was room."""
    text, ends, keys = get(job, TEXT), get(job, ENDS), get(job, KEYS)
    out, room = get(job, IDS) + 4 * get(job, N_IDS), get(job, IDS) + 4 * (get(job, IDS_ROOM) - IDS_MARGIN)
    start, status = get(job, POSITION), DONE
    for i in range(count):
        end, entry = load_i64(ends + 8 * i), load_i64(keys + 16 * i)
        if out + 4 * (end - start) > room:
            put(job, NEEDED_BYTES, end - start)
            status = NEEDS_IDS
            break
        if entry == 0:
            if end - start > get(job, LONG_ROOM):
                put(job, NEEDED_BYTES, end - start)
                status = NEEDS_LONG_ROOM
                break
            out += 4 * merge_long(job, text + start, end - start, out)
        else:
            value = load_u64(entry + 16)
            n_ids = np.int64(value & _LOW_8)
            if n_ids <= INLINE_IDS:
                store_u64(out, (value >> _8) & _LOW_24 | value & ~_LOW_32)
                store_u64(out + 8, load_u64(entry + 24))
            else:
                place = get(job, LONG_IDS) + 4 * np.int64(value >> _32)
                for k in range(n_ids):
                    store_u32(out + 4 * k, load_u32(place + 4 * k))
            out += 4 * n_ids
        start = end
    put(job, N_IDS, (out - get(job, IDS)) >> 2)
    put(job, POSITION, start)
    return status


_ZERO, _8, _32 = np.uint64(0), np.uint64(8), np.uint64(32)
_LOW_8, _LOW_24, _LOW_32 = np.uint64(2**8 - 1), np.uint64(2**24 - 1), np.uint64(2**32 - 1)
