"""A hash table from pre-tokens to their ids, compiled: few distinct pre-tokens make up most of a text.

An entry is four uint64: two for the key, two for the value. A pre-token of at most 15 bytes is its own key: its bytes,
zero padding, and its length in the highest byte. For a longer one, up to LONGEST bytes, the key is a hash, the length,
and the offset of its bytes in LONG_BYTES, where they are compared. Lengths are never 0, so an entry whose second word
is 0 is empty. The hash is keyed; see fields.py.

The value is up to four uint32 ids; the high byte of the first is their number. If there are more ids, the second is
their offset in LONG_IDS.

Pre-tokens are looked up many at a time. In the queue of keys each has the two words of its key, in which a long one has
no offset yet, and the address of the entry at which its search begins, which is prefetched.
"""

import numpy as np
from numpy.typing import NDArray

from napkin.machine_code.compiled_function import CompiledFunction, inlined, jitted
from napkin.machine_code.pointers import (
    call_scanner,
    folded_product,
    load_i64,
    load_u8,
    load_u64,
    prefetch,
    store_i64,
    store_u64,
)
from napkin.tokenizer.numba import fields, scanners
from napkin.tokenizer.numba.character_classes import character_classes
from napkin.tokenizer.numba.fields import get
from napkin.tokenizer.numba.scanners import MARGIN
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION

ENTRY_BYTES, KEY_BYTES = 32, 24
INLINE_BYTES = 15
INLINE_IDS = 4
LONGEST = 255

_ZERO, _56 = np.uint64(0), np.uint64(56)
# In place of the second word of a key: longer than LONGEST. No entry has it.
TOO_LONG = np.uint64(2**64 - 1)
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
    text, masks = get(state, fields.TEXT), get(state, fields.KEY_MASKS)
    last = get(state, fields.LIMIT) - 16
    ends, key = get(state, fields.ENDS), get(state, fields.KEYS)
    table, mask = get(state, fields.TABLE), get(state, fields.N_SLOTS) - 1
    hash_key, multiplier = np.uint64(get(state, fields.HASH_KEY)), np.uint64(get(state, fields.HASH_MULTIPLIER))
    start = get(state, fields.POSITION)
    store_i64(ends - 8, start)
    for i in range(count):
        end = load_i64(ends + 8 * i)
        length = end - start
        # One branch, as the length of a word is unpredictable.
        if (length <= INLINE_BYTES) & (start <= last):
            low = load_u64(text + start) & load_u64(masks + 16 * length)
            high = load_u64(text + start + 8) & load_u64(masks + 16 * length + 8)
            high |= np.uint64(length) << _56
        else:
            low, high = _slow_key(text, start, end, hash_key, multiplier)
        entry = table + ENTRY_BYTES * slot_of(low, high, hash_key, multiplier, mask)
        prefetch(entry)
        store_u64(key, low)
        store_u64(key + 8, high)
        store_i64(key + 16, entry)
        key += KEY_BYTES
        start = end


@jitted
def _slow_key(text, start, end, hash_key, multiplier):
    """The two words of the key of a long pre-token, or of one at the end of what may be read."""
    length = end - start
    if length > LONGEST:
        return _ZERO, TOO_LONG
    if length <= INLINE_BYTES:
        low, high = _ZERO, np.uint64(length) << _56
        for i in range(min(length, 8)):
            low |= np.uint64(load_u8(text + start + i)) << np.uint64(8 * i)
        for i in range(8, length):
            high |= np.uint64(load_u8(text + start + i)) << np.uint64(8 * (i - 8))
        return low, high
    low = np.uint64(length) ^ hash_key
    for i in range(start, end - 8, 8):
        low = folded_product(low ^ load_u64(text + i), multiplier)
    return folded_product(low ^ load_u64(text + end - 8), multiplier), np.uint64(length) << _56


@inlined
def slot_of(low, high, hash_key, multiplier, mask):
    """The slot at which the search for a key begins."""
    return np.int64(folded_product(low ^ hash_key, high ^ multiplier)) & mask


@inlined
def is_entry_of(entry, low, high):
    """True if an entry is that of a key, by both words alone: never for a long pre-token, whose entry has an offset."""
    return ((load_u64(entry) ^ low) | (load_u64(entry + 8) ^ high)) == _ZERO


@jitted
def find(state, text, start, low, high):
    """The address of the entry of the pre-token at `start` with that key, or of the empty entry where it belongs."""
    table, mask = get(state, fields.TABLE), get(state, fields.N_SLOTS) - 1
    hash_key, multiplier = np.uint64(get(state, fields.HASH_KEY)), np.uint64(get(state, fields.HASH_MULTIPLIER))
    slot = slot_of(low, high, hash_key, multiplier, mask)
    while True:
        entry = table + ENTRY_BYTES * slot
        same, found = load_u64(entry) == low, load_u64(entry + 8)
        if (found == high and same) or found == _ZERO:
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


_KEY_MASKS = np.where(np.arange(16) < np.arange(INLINE_BYTES + 1)[:, None], 255, 0).astype(np.uint8)

# Enough for a few hundred kilobytes of text.
_FIRST_SLOTS = 2**16
_FIRST_LONG_BYTES = 2**16
_TABLE_GROWTH = 4
# The first offset in LONG_BYTES is not 0: with an offset, the entry of a long pre-token differs from any key that is
# searched for, so that its bytes are always compared.
_FIRST_PLACE = 1


class Workspace(fields.State):
    """A state (see fields.py) with the arrays that its addresses point to, enlarged when they are full; for one thread.

    The table of pre-tokens with its LONG_BYTES and LONG_IDS stays below `cache_bytes`, but never below its first size.
    """

    def __init__(self, pattern: str, cache_bytes: int, unicode_version: str = DEFAULT_VERSION) -> None:
        super().__init__(fields.N_FIELDS, fields.HASH_KEY)
        self.cache_bytes = cache_bytes
        self.state[fields.SCANNER] = getattr(scanners, f"scan_{pattern}").address
        self.point(fields.CLASSES, character_classes(unicode_version))
        self.point(fields.ENDS, np.zeros(1 + fields.QUEUE + MARGIN, np.int64)[1:])
        self.point(fields.NEW, np.zeros((fields.QUEUE + MARGIN, 3), np.int64))
        self.point(fields.KEYS, np.zeros((fields.QUEUE + MARGIN, KEY_BYTES // 8), np.uint64))
        self.point(fields.KEY_MASKS, _KEY_MASKS)
        self._allocate_table(_FIRST_SLOTS)
        self._allocate_long(_FIRST_LONG_BYTES)
        self.state[fields.LONG_BYTES_USED] = _FIRST_PLACE

    def set_text(self, text: NDArray[np.uint8], document_ends: NDArray[np.int64], start: int = 0) -> None:
        """Begin with the documents that follow one another in `text`, the first at `start`."""
        self.point(fields.TEXT, text, fields.LIMIT)
        self.point(fields.DOCUMENT_ENDS, document_ends, fields.N_DOCUMENTS)
        self.state[fields.DOCUMENT] = 0
        self.state[fields.POSITION] = start

    def release(self) -> None:
        """Do not keep the text and its ids alive any longer."""
        for field in (fields.TEXT, fields.OUT):
            self._arrays.pop(field, None)

    def make_room(self, *, may_clear: bool) -> None:
        """Enlarge whichever is full, the table or LONG_BYTES and LONG_IDS; with `may_clear`, empty all if too large."""
        state = self.state
        n_slots = int(state[fields.N_SLOTS])
        table_bytes = n_slots * ENTRY_BYTES
        long_bytes = self.array(fields.LONG_BYTES).nbytes + self.array(fields.LONG_IDS).nbytes
        table_is_full = state[fields.N_ENTRIES] + fields.QUEUE + MARGIN > state[fields.ENTRIES_ROOM]
        grown = table_bytes * _TABLE_GROWTH + long_bytes if table_is_full else table_bytes + 2 * long_bytes
        if may_clear and grown > self.cache_bytes:
            self.array(fields.TABLE)[:] = 0
            for field in (fields.N_ENTRIES, fields.LONG_IDS_USED):
                state[field] = 0
            state[fields.LONG_BYTES_USED] = _FIRST_PLACE
        elif table_is_full:
            old = self.array(fields.TABLE)
            self._allocate_table(n_slots * _TABLE_GROWTH)
            move_entries(self.address, old.ctypes.data, n_slots)
        else:
            bytes_, ids = self.array(fields.LONG_BYTES), self.array(fields.LONG_IDS)
            self._allocate_long(2 * len(bytes_))
            self.array(fields.LONG_BYTES)[: len(bytes_)] = bytes_
            self.array(fields.LONG_IDS)[: len(ids)] = ids

    def _allocate_table(self, n_slots: int) -> None:
        self.point(fields.TABLE, aligned_zeros((n_slots, ENTRY_BYTES // 8)), fields.N_SLOTS)
        self.state[fields.ENTRIES_ROOM] = n_slots // 8 * 5

    def _allocate_long(self, n_bytes: int) -> None:
        self.point(fields.LONG_BYTES, np.empty(n_bytes, np.uint8), fields.LONG_BYTES_ROOM)
        self.point(fields.LONG_IDS, np.empty(n_bytes + LONGEST, np.uint32))
        self.state[fields.LONG_IDS_ROOM] = n_bytes


def aligned_zeros(shape: tuple[int, int]) -> NDArray[np.uint64]:
    """Zeros aligned to a cache line of 64 bytes, so that no entry straddles two."""
    size = shape[0] * shape[1]
    memory = np.zeros(size + 7, np.uint64)
    begin = -memory.ctypes.data % 64 // 8
    return memory[begin : begin + size].reshape(shape)
