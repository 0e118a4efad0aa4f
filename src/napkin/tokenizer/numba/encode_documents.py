"""Text to ids, compiled: find pre-tokens, look them up, and apply merges to those seen for the first time.

Plain twin: `merge_symbols` of each pre-token of `PreTokenizer.split`, document by document.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import (
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    store_i64,
    store_u8,
    store_u32,
    store_u64,
)
from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba.apply_merges import SHORT, merge_long, merge_short, merge_two_short, short_ids
from napkin.tokenizer.numba.fields import get, put
from napkin.tokenizer.numba.pre_token_table import INLINE_BYTES, INLINE_IDS, fill_queue, find
from napkin.tokenizer.numba.scanners import MARGIN

# Ids are stored four at a time, even when there are fewer.
IDS_MARGIN = 4


@CompiledFunction
def encode_documents(state):
    """Encode the documents from DOCUMENT and POSITION on, until they end or a buffer is full.

    Returns DONE; NEEDS_TABLE if the table, LONG_BYTES or LONG_IDS must be enlarged or emptied; NEEDS_IDS if ids must be
    taken from IDS, or IDS enlarged to as many ids as the next pre-token has bytes; or NEEDS_LONG_ROOM if that pre-token
    is too long for the merge buffers. The last two leave its length in NEEDED_BYTES.
    """
    while get(state, fields.DOCUMENT) < get(state, fields.N_DOCUMENTS):
        document = get(state, fields.DOCUMENT)
        stop = load_i64(get(state, fields.DOCUMENT_ENDS) + 8 * document)
        before = get(state, fields.N_IDS)
        status = _encode_until(state, stop)
        if get(state, fields.N_IDS_BY_DOCUMENT):
            total = get(state, fields.N_IDS_BY_DOCUMENT) + 8 * document
            store_i64(total, load_i64(total) + get(state, fields.N_IDS) - before)
        if status != fields.DONE:
            return status
        put(state, fields.DOCUMENT, document + 1)
    return fields.DONE


@jitted
def _encode_until(state, stop):
    while get(state, fields.POSITION) < stop:
        if get(state, fields.N_ENTRIES) + fields.QUEUE + MARGIN > get(state, fields.ENTRIES_ROOM):
            return fields.NEEDS_TABLE
        status = _encode_queue(state, fill_queue(state, stop))
        if status != fields.DONE:
            return status
    return fields.DONE


@jitted
def _encode_queue(state, count):
    """Encode the `count` pre-tokens from POSITION on whose ends are in ENDS, or as many as there is room for.

    In three passes, so that cache misses overlap within each: look up all, merge the new ones, write all ids.
    """
    found = _find_all(state, count)
    status = fields.DONE if found == count else fields.NEEDS_TABLE
    _merge_new(state)
    written = _write_ids(state, found)
    return status if written == fields.DONE else written


@jitted
def _find_all(state, count):
    """Replace each pre-token's key by the address of its entry, 0 if it is too long; returns how many were found.

    New pre-tokens get an entry, whose ids are filled in later, and are listed in NEW.
    """
    text, new = get(state, fields.TEXT), get(state, fields.NEW)
    ends, keys = get(state, fields.ENDS), get(state, fields.KEYS)
    start, n_new = get(state, fields.POSITION), 0
    n_entries, long_used = get(state, fields.N_ENTRIES), get(state, fields.LONG_BYTES_USED)
    long_room = get(state, fields.LONG_BYTES_ROOM)
    # A pre-token has at most as many ids as bytes.
    ids_room = get(state, fields.LONG_IDS_ROOM) - get(state, fields.LONG_IDS_USED)
    done = count
    for i in range(count):
        end = load_i64(ends + 8 * i)
        low, high = load_u64(keys + 16 * i), load_u64(keys + 16 * i + 8)
        entry = 0
        if high != _ZERO:
            entry = find(state, text, start, low, high)
            if load_u64(entry + 8) == _ZERO:
                n_bytes = end - start
                ids_room -= n_bytes
                if ids_room < 0 or (n_bytes > INLINE_BYTES and long_used + n_bytes > long_room):
                    done = i
                    break
                if n_bytes > INLINE_BYTES:
                    for k in range(n_bytes):
                        store_u8(get(state, fields.LONG_BYTES) + long_used + k, load_u8(text + start + k))
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
    put(state, fields.N_NEW, n_new)
    put(state, fields.N_ENTRIES, n_entries + n_new)
    put(state, fields.LONG_BYTES_USED, long_used)
    return done


@jitted
def _merge_new(state):
    """Compute the ids of the pre-tokens in NEW, short ones two at a time."""
    new, waiting = get(state, fields.NEW), -1
    for i in range(get(state, fields.N_NEW)):
        text, n_bytes = load_i64(new + 24 * i + 8), load_i64(new + 24 * i + 16)
        if n_bytes > SHORT:
            address = get(state, fields.LONG_IDS) + 4 * get(state, fields.LONG_IDS_USED)
            _remember(state, load_i64(new + 24 * i), address, merge_long(state, text, n_bytes, address))
        elif waiting < 0:
            waiting = i
        else:
            other = new + 24 * waiting
            n_ids, n_other = merge_two_short(state, text, n_bytes, load_i64(other + 8), load_i64(other + 16))
            _remember(state, load_i64(new + 24 * i), short_ids(state, 0), n_ids)
            _remember(state, load_i64(other), short_ids(state, 1), n_other)
            waiting = -1
    if waiting >= 0:
        last = new + 24 * waiting
        n_ids = merge_short(state, load_i64(last + 8), load_i64(last + 16))
        _remember(state, load_i64(last), short_ids(state, 0), n_ids)


@jitted
def _remember(state, entry, ids, n_ids):
    """Store ids in an entry, or in LONG_IDS if there are too many."""
    if n_ids <= INLINE_IDS:
        # Values after the last id are copied too; in the output the next ids overwrite them.
        store_u64(entry + 16, np.uint64(n_ids | load_u32(ids) << 8) | load_u64(ids + 4) << _32)
        store_u64(entry + 24, load_u64(ids + 8))
        return
    place = get(state, fields.LONG_IDS_USED)
    for k in range(n_ids):
        store_u32(get(state, fields.LONG_IDS) + 4 * (place + k), load_u32(ids + 4 * k))
    put(state, fields.LONG_IDS_USED, place + n_ids)
    store_u64(entry + 16, np.uint64(n_ids) | np.uint64(place) << _32)


@jitted
def _write_ids(state, count):
    """Write the ids of the queue, and move POSITION past the last pre-token for which there was room."""
    text, ends, keys = get(state, fields.TEXT), get(state, fields.ENDS), get(state, fields.KEYS)
    out = get(state, fields.IDS) + 4 * get(state, fields.N_IDS)
    room = get(state, fields.IDS) + 4 * (get(state, fields.IDS_ROOM) - IDS_MARGIN)
    start, status = get(state, fields.POSITION), fields.DONE
    for i in range(count):
        end, entry = load_i64(ends + 8 * i), load_i64(keys + 16 * i)
        if out + 4 * (end - start) > room:
            put(state, fields.NEEDED_BYTES, end - start)
            status = fields.NEEDS_IDS
            break
        if entry == 0:
            if end - start > get(state, fields.LONG_ROOM):
                put(state, fields.NEEDED_BYTES, end - start)
                status = fields.NEEDS_LONG_ROOM
                break
            out += 4 * merge_long(state, text + start, end - start, out)
        else:
            value = load_u64(entry + 16)
            n_ids = np.int64(value & _LOW_8)
            if n_ids <= INLINE_IDS:
                store_u64(out, (value >> _8) & _LOW_24 | value & ~_LOW_32)
                store_u64(out + 8, load_u64(entry + 24))
            else:
                place = get(state, fields.LONG_IDS) + 4 * np.int64(value >> _32)
                for k in range(n_ids):
                    store_u32(out + 4 * k, load_u32(place + 4 * k))
            out += 4 * n_ids
        start = end
    put(state, fields.N_IDS, (out - get(state, fields.IDS)) >> 2)
    put(state, fields.POSITION, start)
    return status


_ZERO, _8, _32 = np.uint64(0), np.uint64(8), np.uint64(32)
_LOW_8, _LOW_24, _LOW_32 = np.uint64(2**8 - 1), np.uint64(2**24 - 1), np.uint64(2**32 - 1)
