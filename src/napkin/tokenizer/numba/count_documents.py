"""Counting pre-tokens, compiled. Plain twin: a Counter over `PreTokenizer.split`, document by document.

The table is that of pre_token_table.py; the first word of a value is the count, the second is unused. Pre-tokens longer
than LONGEST are counted by the caller.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import (
    load_i64,
    load_u8,
    load_u64,
    store_i64,
    store_u8,
    store_u32,
    store_u64,
)
from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba.fields import get, put
from napkin.tokenizer.numba.pre_token_table import ENTRY_BYTES, INLINE_BYTES, fill_queue, find
from napkin.tokenizer.numba.scanners import MARGIN

_ZERO, _56 = np.uint64(0), np.uint64(56)
_PLACE = np.uint64(2**56 - 1)


@CompiledFunction
def count_documents(state):
    """Count the pre-tokens of the documents from DOCUMENT and POSITION on.

    Returns DONE; NEEDS_TABLE if the table or LONG_BYTES must be enlarged; or NEEDS_LONG_ROOM if the caller must count
    the pre-token of NEEDED_BYTES at POSITION itself and continue after it.
    """
    while get(state, fields.DOCUMENT) < get(state, fields.N_DOCUMENTS):
        stop = load_i64(get(state, fields.DOCUMENT_ENDS) + 8 * get(state, fields.DOCUMENT))
        while get(state, fields.POSITION) < stop:
            if get(state, fields.N_ENTRIES) + fields.QUEUE + MARGIN > get(state, fields.ENTRIES_ROOM):
                return fields.NEEDS_TABLE
            status = _count_queue(state, fill_queue(state, stop))
            if status != fields.DONE:
                return status
        put(state, fields.DOCUMENT, get(state, fields.DOCUMENT) + 1)
    return fields.DONE


@jitted
def _count_queue(state, count):
    text, ends, keys = get(state, fields.TEXT), get(state, fields.ENDS), get(state, fields.KEYS)
    start, status = get(state, fields.POSITION), fields.DONE
    for i in range(count):
        end = load_i64(ends + 8 * i)
        low, high = load_u64(keys + 16 * i), load_u64(keys + 16 * i + 8)
        if high == _ZERO:
            put(state, fields.NEEDED_BYTES, end - start)
            status = fields.NEEDS_LONG_ROOM
            break
        status = _add(state, text + start, end - start, low, high, 1)
        if status != fields.DONE:
            break
        start = end
    put(state, fields.POSITION, start)
    return status


@jitted
def _add(state, text, n_bytes, low, high, times):
    """Add `times` to the count of the pre-token of `n_bytes` at the address `text`; DONE, or NEEDS_TABLE."""
    entry = find(state, text, 0, low, high)
    if load_u64(entry + 8) == _ZERO:
        if n_bytes > INLINE_BYTES:
            used = get(state, fields.LONG_BYTES_USED)
            if used + n_bytes > get(state, fields.LONG_BYTES_ROOM):
                return fields.NEEDS_TABLE
            for i in range(n_bytes):
                store_u8(get(state, fields.LONG_BYTES) + used + i, load_u8(text + i))
            put(state, fields.LONG_BYTES_USED, used + n_bytes)
            high |= np.uint64(used)
        store_u64(entry, low)
        store_u64(entry + 8, high)
        put(state, fields.N_ENTRIES, get(state, fields.N_ENTRIES) + 1)
    store_i64(entry + 16, load_i64(entry + 16) + times)
    return fields.DONE


@CompiledFunction
def add_counts(state, table, n_slots, long_bytes, slot):
    """Add the counts of another table, from `slot` on; returns the slot it reached, `n_slots` when it is done.

    If it stops earlier, the table must be enlarged.
    """
    while slot < n_slots:
        entry = table + ENTRY_BYTES * slot
        low, high = load_u64(entry), load_u64(entry + 8)
        if high != _ZERO:
            if get(state, fields.N_ENTRIES) + fields.QUEUE + MARGIN > get(state, fields.ENTRIES_ROOM):
                break
            n_bytes = np.int64(high >> _56)
            text = entry
            if n_bytes > INLINE_BYTES:
                text = long_bytes + np.int64(high & _PLACE)
                high &= ~_PLACE
            if _add(state, text, n_bytes, low, high, load_i64(entry + 16)) != fields.DONE:
                break
        slot += 1
    return slot


@CompiledFunction
def count_symbols(table, n_slots):
    """The total number of bytes of all pre-tokens in a table that have at least two bytes."""
    total = 0
    for slot in range(n_slots):
        n_bytes = np.int64(load_u64(table + ENTRY_BYTES * slot + 8) >> _56)
        if n_bytes > 1:
            total += n_bytes
    return total


@CompiledFunction
def list_words(table, n_slots, long_bytes, symbols, starts, counts):
    """Write the pre-tokens of at least two bytes one after another; returns how many there are.

    Word i is `symbols[starts[i] : starts[i + 1]]` and occurs `counts[i]` times: uint32, uint32 and int64, all given by
    their addresses.
    """
    n_words, end = 0, 0
    for slot in range(n_slots):
        entry = table + ENTRY_BYTES * slot
        high = load_u64(entry + 8)
        n_bytes = np.int64(high >> _56)
        if n_bytes < 2:
            continue
        text = entry if n_bytes <= INLINE_BYTES else long_bytes + np.int64(high & _PLACE)
        store_u32(starts + 4 * n_words, end)
        store_i64(counts + 8 * n_words, load_i64(entry + 16))
        for k in range(n_bytes):
            store_u32(symbols + 4 * (end + k), load_u8(text + k))
        end += n_bytes
        n_words += 1
    store_u32(starts + 4 * n_words, end)
    return n_words
