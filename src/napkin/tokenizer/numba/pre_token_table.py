"""A hash table from pre-tokens to their ids, compiled: few distinct pre-tokens make up most of a text.

An entry is four uint64: two for the key, two for the value. A pre-token of at most 15 bytes is its own key: its bytes,
zero padding, and its length in the highest byte. For a longer one, up to LONGEST bytes, the key is a hash, the length,
and the offset of its bytes in LONG_BYTES, where they are compared. Lengths are never 0, so an entry whose second word
is 0 is empty. The hash is keyed; see hash_keys.py.

The value is the number of ids in the low 8 bits and then up to four ids, of 24, 32, 32 and 32 bits. If there are more
ids, the upper half of the first word is their offset in LONG_IDS.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import (
    call_scanner,
    folded_product,
    load_i64,
    load_u8,
    load_u64,
    prefetch,
    store_u64,
)
from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba.fields import get

ENTRY_BYTES = 32
INLINE_BYTES = 15
INLINE_IDS = 4
LONGEST = 255

_ZERO, _ONE, _ALL = np.uint64(0), np.uint64(1), np.uint64(2**64 - 1)
_56 = np.uint64(56)
_PLACE = np.uint64(2**56 - 1)


@jitted
def fill_queue(state, stop):
    """Find the next pre-tokens of the document that ends at `stop`: their ends and keys. Returns how many."""
    count = call_scanner(
        get(state, fields.SCANNER),
        get(state, fields.TEXT),
        get(state, fields.POSITION),
        stop,
        get(state, fields.LIMIT),
        get(state, fields.CLASSES),
        get(state, fields.ENDS),
        fields.QUEUE,
    )
    _prepare_keys(state, count)
    return count


@jitted
def _prepare_keys(state, count):
    """Compute the keys of the `count` pre-tokens whose ends are in ENDS, and prefetch their entries."""
    text, limit = get(state, fields.TEXT), get(state, fields.LIMIT)
    ends, keys = get(state, fields.ENDS), get(state, fields.KEYS)
    table, mask = get(state, fields.TABLE), get(state, fields.N_SLOTS) - 1
    hash_key, multiplier = np.uint64(get(state, fields.HASH_KEY)), np.uint64(get(state, fields.HASH_MULTIPLIER))
    start = get(state, fields.POSITION)
    for i in range(count):
        end = load_i64(ends + 8 * i)
        low, high = key_of(text, start, end, limit, hash_key, multiplier)
        store_u64(keys + 16 * i, low)
        store_u64(keys + 16 * i + 8, high)
        prefetch(table + ENTRY_BYTES * slot_of(low, high, hash_key, multiplier, mask))
        start = end


@jitted
def key_of(text, start, end, limit, hash_key, multiplier):
    """The two words of a pre-token's key, without the offset of a long one; (0, 0) if it is longer than LONGEST."""
    length = end - start
    if length <= INLINE_BYTES:
        if start + 16 <= limit:
            # Shifts instead of a branch: the length of a word is unpredictable.
            low = load_u64(text + start) & (_ALL >> np.uint64(64 - 8 * min(length, 8)))
            high = load_u64(text + start + 8) & ((_ONE << np.uint64(8 * max(length - 8, 0))) - _ONE)
        else:
            low, high = _ZERO, _ZERO
            for i in range(min(length, 8)):
                low |= np.uint64(load_u8(text + start + i)) << np.uint64(8 * i)
            for i in range(8, length):
                high |= np.uint64(load_u8(text + start + i)) << np.uint64(8 * (i - 8))
        return low, high | np.uint64(length) << _56
    if length > LONGEST:
        return _ZERO, _ZERO
    low = np.uint64(length) ^ hash_key
    for i in range(start, end - 8, 8):
        low = folded_product(low ^ load_u64(text + i), multiplier)
    return folded_product(low ^ load_u64(text + end - 8), multiplier), np.uint64(length) << _56


@jitted
def slot_of(low, high, hash_key, multiplier, mask):
    """The slot at which the search for a key begins."""
    return np.int64(folded_product(low ^ hash_key, high ^ multiplier)) & mask


@jitted
def find(state, text, start, low, high):
    """The address of the entry of the pre-token at `start` with that key, or of the empty entry where it belongs."""
    table, mask = get(state, fields.TABLE), get(state, fields.N_SLOTS) - 1
    hash_key, multiplier = np.uint64(get(state, fields.HASH_KEY)), np.uint64(get(state, fields.HASH_MULTIPLIER))
    slot = slot_of(low, high, hash_key, multiplier, mask)
    while True:
        entry = table + ENTRY_BYTES * slot
        same, found = load_u64(entry) == low, load_u64(entry + 8)
        if found == high and same:
            return entry
        if found == _ZERO:
            return entry
        # For a long one only the hash has been compared so far.
        if same and high >> _56 > _LONGEST_INLINE and found >> _56 == high >> _56:
            place = get(state, fields.LONG_BYTES) + np.int64(found & _PLACE)
            if same_bytes(place, text + start, np.int64(high >> _56)):
                return entry
        slot = (slot + 1) & mask


_LONGEST_INLINE = np.uint64(INLINE_BYTES)


@jitted
def same_bytes(first, second, length):
    """True if the `length` bytes, at least 8, at two addresses are equal."""
    for i in range(0, length - 8, 8):
        if load_u64(first + i) != load_u64(second + i):
            return False
    return load_u64(first + length - 8) == load_u64(second + length - 8)


@CompiledFunction
def move_entries(state, old, n_old):
    """Copy the entries of a table of `n_old` slots at address `old` into TABLE, larger and empty. Plain: a dict."""
    new, mask = get(state, fields.TABLE), get(state, fields.N_SLOTS) - 1
    hash_key, multiplier = np.uint64(get(state, fields.HASH_KEY)), np.uint64(get(state, fields.HASH_MULTIPLIER))
    for entry in range(old, old + ENTRY_BYTES * n_old, ENTRY_BYTES):
        high = load_u64(entry + 8)
        if high == _ZERO:
            continue
        # The offset of a long pre-token is not part of its hash.
        hashed = high if high >> _56 <= _LONGEST_INLINE else high & ~_PLACE
        slot = slot_of(load_u64(entry), hashed, hash_key, multiplier, mask)
        while load_u64(new + ENTRY_BYTES * slot + 8) != _ZERO:
            slot = (slot + 1) & mask
        for k in range(0, ENTRY_BYTES, 8):
            store_u64(new + ENTRY_BYTES * slot + k, load_u64(entry + k))
