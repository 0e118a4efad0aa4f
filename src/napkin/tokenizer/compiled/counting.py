"""Counting pre-tokens, compiled. Plain twin: a Counter over `PreTokenizer.split`, document by document.

The table is that of cache.py, in which the first word of a value is the count and the second is not used. Pre-tokens
longer than LONGEST are left to the caller.
"""

import numpy as np

from napkin.tokenizer.compiled.cache import ENTRY_BYTES, INLINE_BYTES, fill_queue, find
from napkin.tokenizer.compiled.intrinsics import (
    load_i64,
    load_u8,
    load_u64,
    store_i64,
    store_u8,
    store_u64,
)
from napkin.tokenizer.compiled.jobs import (
    DOCUMENT,
    DOCUMENT_ENDS,
    DONE,
    ENDS,
    ENTRIES_ROOM,
    KEYS,
    LONG_BYTES,
    LONG_BYTES_ROOM,
    LONG_BYTES_USED,
    N_DOCUMENTS,
    N_ENTRIES,
    NEEDED_BYTES,
    NEEDS_LONG_ROOM,
    NEEDS_TABLE,
    POSITION,
    QUEUE,
    TEXT,
    get,
    put,
)
from napkin.tokenizer.compiled.machine_code import compiled, part
from napkin.tokenizer.compiled.scanners import MARGIN

_ZERO, _56 = np.uint64(0), np.uint64(56)
_PLACE = np.uint64(2**56 - 1)


@compiled("int64(int64)")
def count_documents(job):
    """Count the pre-tokens of documents from DOCUMENT and POSITION on until they end.

    Returns DONE; NEEDS_TABLE, where the table or what is beside it must be enlarged; or NEEDS_LONG_ROOM, where the
    caller has to count the pre-token of NEEDED_BYTES at POSITION and to go on behind it.
    """
    while get(job, DOCUMENT) < get(job, N_DOCUMENTS):
        stop = load_i64(get(job, DOCUMENT_ENDS) + 8 * get(job, DOCUMENT))
        while get(job, POSITION) < stop:
            if get(job, N_ENTRIES) + QUEUE + MARGIN > get(job, ENTRIES_ROOM):
                return NEEDS_TABLE
            status = _count_queue(job, fill_queue(job, stop))
            if status != DONE:
                return status
        put(job, DOCUMENT, get(job, DOCUMENT) + 1)
    return DONE


@part
def _count_queue(job, count):
    text, ends, keys = get(job, TEXT), get(job, ENDS), get(job, KEYS)
    start, status = get(job, POSITION), DONE
    for i in range(count):
        end = load_i64(ends + 8 * i)
        low, high = load_u64(keys + 16 * i), load_u64(keys + 16 * i + 8)
        if high == _ZERO:
            put(job, NEEDED_BYTES, end - start)
            status = NEEDS_LONG_ROOM
            break
        status = _add(job, text + start, end - start, low, high, 1)
        if status != DONE:
            break
        start = end
    put(job, POSITION, start)
    return status


@part
def _add(job, text, n_bytes, low, high, times):
    """Count the pre-token of `n_bytes` at the address `text` so many times."""
    entry = find(job, text, 0, low, high)
    if load_u64(entry + 8) == _ZERO:
        if n_bytes > INLINE_BYTES:
            used = get(job, LONG_BYTES_USED)
            if used + n_bytes > get(job, LONG_BYTES_ROOM):
                return NEEDS_TABLE
            for i in range(n_bytes):
                store_u8(get(job, LONG_BYTES) + used + i, load_u8(text + i))
            put(job, LONG_BYTES_USED, used + n_bytes)
            high |= np.uint64(used)
        store_u64(entry, low)
        store_u64(entry + 8, high)
        put(job, N_ENTRIES, get(job, N_ENTRIES) + 1)
    store_i64(entry + 16, load_i64(entry + 16) + times)
    return DONE


@compiled("int64(int64, int64, int64, int64, int64)")
def add_counts(job, table, n_slots, long_bytes, slot):
    """Add the counts of another table, from a slot on; returns how far it came, `n_slots` where it is done.

    Where it stops before, there must be more room.
    """
    while slot < n_slots:
        entry = table + ENTRY_BYTES * slot
        low, high = load_u64(entry), load_u64(entry + 8)
        if high != _ZERO:
            if get(job, N_ENTRIES) + QUEUE + MARGIN > get(job, ENTRIES_ROOM):
                break
            n_bytes = np.int64(high >> _56)
            text = entry
            if n_bytes > INLINE_BYTES:
                text = long_bytes + np.int64(high & _PLACE)
                high &= ~_PLACE
            if _add(job, text, n_bytes, low, high, load_i64(entry + 16)) != DONE:
                break
        slot += 1
    return slot


@compiled("int64(uint64[:, ::1])")
def count_symbols(table):
    """Bytes of all pre-tokens of a table that have at least two."""
    total = 0
    for i in range(len(table)):
        n_bytes = np.int64(table[i, 1] >> _56)
        if n_bytes > 1:
            total += n_bytes
    return total


@compiled("int64(uint64[:, ::1], uint8[::1], uint32[::1], uint32[::1], int64[::1])")
def list_words(table, long_bytes, symbols, starts, counts):
    """Write the pre-tokens of at least two bytes one after the other; returns their number.

    Word i is `symbols[starts[i] : starts[i + 1]]` and occurs `counts[i]` times.
    """
    n_words, end = 0, 0
    for i in range(len(table)):
        n_bytes = np.int64(table[i, 1] >> _56)
        if n_bytes < 2:
            continue
        place = np.int64(table[i, 1] & _PLACE)
        starts[n_words] = end
        counts[n_words] = np.int64(table[i, 2])
        for k in range(n_bytes):
            if n_bytes > INLINE_BYTES:
                symbols[end + k] = long_bytes[place + k]
            else:
                symbols[end + k] = (table[i, k >> 3] >> np.uint64(8 * (k & 7))) & np.uint64(255)
        end += n_bytes
        n_words += 1
    starts[n_words] = end
    return n_words
