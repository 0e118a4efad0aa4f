"""Text to ids, compiled: scan, look up, and merge what is seen for the first time.

Plain twin: `apply_merges` of each pre-token of `PreTokenizer.split`, document by document.
"""

import numpy as np

from napkin.tokenizer.compiled.cache import INLINE_BYTES, INLINE_IDS, find, prepare_keys
from napkin.tokenizer.compiled.intrinsics import (
    call_scanner,
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
    CLASSES,
    DOCUMENT,
    DOCUMENT_ENDS,
    DONE,
    ENDS,
    ENTRIES_ROOM,
    IDS,
    IDS_ROOM,
    KEYS,
    LIMIT,
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
    NEEDED_BYTES,
    NEEDS_IDS,
    NEEDS_LONG_ROOM,
    NEEDS_TABLE,
    POSITION,
    QUEUE,
    SCANNER,
    SHORT_IDS,
    TEXT,
    get,
    put,
)
from napkin.tokenizer.compiled.machine_code import compiled, part
from napkin.tokenizer.compiled.merging import SHORT, merge_long, merge_short
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
        count = call_scanner(
            get(job, SCANNER),
            get(job, TEXT),
            get(job, POSITION),
            stop,
            get(job, LIMIT),
            get(job, CLASSES),
            get(job, ENDS),
            QUEUE,
        )
        status = encode_queue(job, count)
        if status != DONE:
            return status
    return DONE


@part
def encode_queue(job, count):
    """Encode the `count` pre-tokens from POSITION on whose ends are in ENDS, or as many as there is room for."""
    prepare_keys(job, count)
    text, ends, keys = get(job, TEXT), get(job, ENDS), get(job, KEYS)
    out, room = get(job, IDS) + 4 * get(job, N_IDS), get(job, IDS) + 4 * (get(job, IDS_ROOM) - IDS_MARGIN)
    start, status = get(job, POSITION), DONE
    for i in range(count):
        end = load_i64(ends + 8 * i)
        if out + 4 * (end - start) > room:
            put(job, NEEDED_BYTES, end - start)
            status = NEEDS_IDS
            break
        low, high = load_u64(keys + 16 * i), load_u64(keys + 16 * i + 8)
        if high == _ZERO:
            if end - start > get(job, LONG_ROOM):
                put(job, NEEDED_BYTES, end - start)
                status = NEEDS_LONG_ROOM
                break
            out += 4 * merge_long(job, text + start, end - start, out)
        else:
            entry = find(job, text, start, low, high)
            if load_u64(entry + 8) == _ZERO:
                status = _add(job, entry, start, end, low, high)
                if status != DONE:
                    break
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


@part
def _add(job, entry, start, end, low, high):
    """Merge a pre-token that is not in the table and put it there."""
    text, n_bytes = get(job, TEXT) + start, end - start
    # As many ids as bytes, if nothing merges.
    if get(job, LONG_IDS_USED) + n_bytes > get(job, LONG_IDS_ROOM):
        return NEEDS_TABLE
    place = get(job, LONG_IDS_USED)
    address = get(job, LONG_IDS) + 4 * place
    if n_bytes > INLINE_BYTES:
        used = get(job, LONG_BYTES_USED)
        if used + n_bytes > get(job, LONG_BYTES_ROOM):
            return NEEDS_TABLE
        for i in range(n_bytes):
            store_u8(get(job, LONG_BYTES) + used + i, load_u8(text + i))
        put(job, LONG_BYTES_USED, used + n_bytes)
        high |= np.uint64(used)
    if n_bytes > SHORT:
        n_ids = merge_long(job, text, n_bytes, address)
    else:
        n_ids = merge_short(job, text, n_bytes)
        address = get(job, SHORT_IDS) + 4
    if n_ids <= INLINE_IDS:
        # What stands beyond the last id is copied along and overwritten by what follows.
        store_u64(entry + 16, np.uint64(n_ids | load_u32(address) << 8) | load_u64(address + 4) << _32)
        store_u64(entry + 24, load_u64(address + 8))
    else:
        if n_bytes <= SHORT:
            for k in range(n_ids):
                store_u32(get(job, LONG_IDS) + 4 * (place + k), load_u32(address + 4 * k))
        put(job, LONG_IDS_USED, place + n_ids)
        store_u64(entry + 16, np.uint64(n_ids) | np.uint64(place) << _32)
    store_u64(entry, low)
    store_u64(entry + 8, high)
    put(job, N_ENTRIES, get(job, N_ENTRIES) + 1)
    return DONE
