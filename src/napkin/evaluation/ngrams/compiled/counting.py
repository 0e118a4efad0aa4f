"""Counting n-grams and making their probabilities, compiled: passes over sorted keys.

A gram w_1 … w_n is a key of 64 bits, its context reversed before its last symbol: w_(n-1) … w_1 w_n from the highest
byte to the lowest. In the order of keys the grams of a context are neighbours, and so are all grams that differ in w_1
and w_n alone: the grams of the next lower order, and how many symbols stand before each, follow from one pass.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f64_at, i64_at, u8_at, u32_at, u64_at

MARK = 255
_8 = np.uint64(8)
_16 = np.uint64(16)
_BYTE = np.uint64(255)


@CompiledFunction
def pack_grams(text, n_bytes, order, keys, begins, room, n_begins):
    """Write the keys of all n-grams of the order inside documents, each between two marks, and return their number.

    For the orders below, begins[order] gets the keys of grams that begin with a mark, `room` for each order, and
    n_begins[order] their number.
    """
    symbols, key = u8_at(text), u64_at(keys)
    begin, n_begin = u64_at(begins), i64_at(n_begins)
    top = np.uint64(8 * (order - 2))
    context, filled, first, n = np.uint64(0), 0, np.uint64(0), 0
    for i in range(n_bytes):
        symbol = np.uint64(symbols[i])
        if filled >= order - 1:
            key[n] = (context << _8) | symbol
            n += 1
        elif filled >= 1:
            at = filled + 1
            begin[at * room + n_begin[at]] = (first << _8) | symbol
            n_begin[at] += 1
        if symbol == _BYTE:
            # The end of one document is the beginning of the next.
            context, filled, first = _BYTE << top, 1, _BYTE
        else:
            if filled < order - 1:
                first |= symbol << np.uint64(8 * filled)
            context = (symbol << top) | (context >> _8)
            filled += 1
    return n


@CompiledFunction
def count_equal(keys, counts, n):
    """Keep one of each run of equal keys, with its length as the count; returns their number."""
    key, count = u64_at(keys), u32_at(counts)
    kept = 0
    i = 0
    while i < n:
        start, value = i, key[i]
        while i < n and key[i] == value:
            i += 1
        key[kept] = value
        count[kept] = np.uint32(i - start)
        kept += 1
    return kept


@CompiledFunction
def merge(keys, counts, n, other_keys, other_counts, n_other, merged_keys, merged_counts):
    """Merge two sorted lists of different keys, and add the counts of those in both; returns their number."""
    a, b, c = u64_at(keys), u64_at(other_keys), u64_at(merged_keys)
    count_a, count_b, count_c = u32_at(counts), u32_at(other_counts), u32_at(merged_counts)
    i = 0
    j = 0
    kept = 0
    while i < n or j < n_other:
        if j == n_other or (i < n and a[i] < b[j]):
            c[kept] = a[i]
            count_c[kept] = count_a[i]
            i += 1
        elif i == n or b[j] < a[i]:
            c[kept] = b[j]
            count_c[kept] = count_b[j]
            j += 1
        else:
            c[kept] = a[i]
            count_c[kept] = count_a[i] + count_b[j]
            i += 1
            j += 1
        kept += 1
    return kept


@CompiledFunction
def shorten(keys, n, shorter_keys, counts, buffer):
    """The grams without their first symbol, in order, and the number of symbols before each; returns their number.

    The buffer is 256 int64, all 0, and so again at the end.
    """
    key, shorter, count, before = u64_at(keys), u64_at(shorter_keys), u32_at(counts), i64_at(buffer)
    kept = 0
    i = 0
    while i < n:
        context = key[i] >> _16
        least, most = 255, 0
        while i < n and (key[i] >> _16) == context:
            symbol = np.int64(key[i] & _BYTE)
            before[symbol] += 1
            least, most = min(least, symbol), max(most, symbol)
            i += 1
        for symbol in range(least, most + 1):
            if before[symbol] != 0:
                shorter[kept] = (context << _8) | np.uint64(symbol)
                count[kept] = np.uint32(before[symbol])
                before[symbol] = 0
                kept += 1
    return kept


@CompiledFunction
def weigh(keys, counts, n, discounts, contexts, firsts, symbols, seen, gammas):
    """Probabilities of an order: for each context its key, its first gram and its gamma; for each gram its symbol and
    (count - discount) / sum of counts. Returns the number of contexts, after which `firsts` ends with n."""
    key, count, discount = u64_at(keys), u32_at(counts), f64_at(discounts)
    context_of, first_of, gamma_of = u64_at(contexts), i64_at(firsts), f64_at(gammas)
    symbol_of, seen_of = u8_at(symbols), f64_at(seen)
    n_contexts = 0
    i = 0
    while i < n:
        context, start, total, lost = key[i] >> _8, i, 0, 0.0
        while i < n and (key[i] >> _8) == context:
            times = np.int64(count[i])
            total += times
            lost += discount[min(times, 3) - 1]
            i += 1
        for j in range(start, i):
            times = np.int64(count[j])
            symbol_of[j] = np.uint8(key[j] & _BYTE)
            seen_of[j] = (times - discount[min(times, 3) - 1]) / total
        context_of[n_contexts] = context
        first_of[n_contexts] = start
        gamma_of[n_contexts] = lost / total
        n_contexts += 1
    first_of[n_contexts] = n
    return n_contexts


@CompiledFunction
def link(keys, n, order, contexts, n_contexts, following, buffer):
    """For each gram, the number of the context of the next order that it is, or -1. The buffer is 256 int64."""
    key, context, follows, place = u64_at(keys), u64_at(contexts), u32_at(following), i64_at(buffer)
    shift = np.uint64(8 * (order - 1))
    # The contexts that end with a symbol are neighbours, in the order of the grams that end with it.
    at = 0
    for symbol in range(256):
        place[symbol] = at
        while at < n_contexts and np.int64((context[at] >> shift) & _BYTE) == symbol:
            at += 1
    for i in range(n):
        symbol = key[i] & _BYTE
        wanted = (symbol << shift) | (key[i] >> _8)
        at = place[np.int64(symbol)]
        while at < n_contexts and context[at] < wanted:
            at += 1
        place[np.int64(symbol)] = at
        follows[i] = np.uint32(at) if at < n_contexts and context[at] == wanted else np.uint32(0xFFFFFFFF)
