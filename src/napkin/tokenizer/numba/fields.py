"""The state that compiled functions work on: an int64 array, passed by its address.

Each name below is an index into that array. Addresses in it belong to numpy arrays that the Python side keeps alive;
compiled code neither allocates nor frees memory. When a buffer is full a function stops where it can be resumed and
returns which buffer it was.
"""

import secrets

import numpy as np
from numpy.typing import NDArray

from napkin.machine_code.compiled_function import jitted
from napkin.machine_code.pointers import load_i64, store_i64

# The text and the position in it. TEXT is an address, LIMIT the number of bytes that may be read. DOCUMENT_ENDS is the
# address of N_DOCUMENTS int64 offsets; document i begins where document i - 1 ends. The next byte to process is at
# POSITION, in document DOCUMENT.
TEXT, LIMIT, DOCUMENT_ENDS, N_DOCUMENTS, DOCUMENT, POSITION = range(6)
# The scanner's machine code and its character classes; buffers of QUEUE + MARGIN ends, before which POSITION stands,
# and of as many keys, three uint64 each: see pre_token_table.py.
SCANNER, CLASSES, ENDS, KEYS = range(6, 10)
# The output: a buffer of uint32 ids, its capacity, the number of ids in it; int64 ids per document (0: not wanted).
IDS, IDS_ROOM, N_IDS, N_IDS_BY_DOCUMENT = range(10, 14)
# The pre-token table: N_SLOTS (a power of two) entries of 32 bytes, how many are used and may be; pre_token_table.py.
TABLE, N_SLOTS, N_ENTRIES, ENTRIES_ROOM = range(14, 18)
# Bytes of pre-tokens that are too long for the table, and uint32 ids of those that have too many for it.
LONG_BYTES, LONG_BYTES_USED, LONG_BYTES_ROOM, LONG_IDS, LONG_IDS_USED, LONG_IDS_ROOM = range(18, 24)
# The vocabulary: merged ids of pairs of bytes, and a hash table of all other pairs; see apply_merges.py.
BYTE_PAIRS, PAIRS, PAIRS_SHIFT, N_BUCKETS = range(24, 28)
# Buffers for merging pre-tokens of up to SHORT bytes, and longer ones of up to LONG_ROOM bytes; see apply_merges.py.
SHORT_IDS, SHORT_RANKS, PLACES, LONG_ROOM, RANKS, RANK_BITS, VOCABULARY = range(28, 35)
# The length in bytes of the pre-token at which a function stopped because a buffer was too small for it.
NEEDED_BYTES = 35
# Pre-tokens of the queue that are not in the table yet, three int64 each: address of the entry, address of the text,
# length in bytes. How many there are.
NEW, N_NEW = 36, 37
# What keys the hash tables: KEY and MULTIPLIER below.
HASH_KEY, HASH_MULTIPLIER = 38, 39
# For a vocabulary on characters, the symbol of each code point as uint32; 0 for a vocabulary on bytes. See
# characters.py.
SYMBOLS = 40
# Masks of the bytes that a key holds, two uint64 for each length.
KEY_MASKS = 41
# The sum of the lengths of those in NEW: as many ids may have to be stored.
N_RESERVED = 42
# The state of the merge in each lane, three int64; see apply_merges.py.
SHORT_LANES = 43
# The end of the only document of a short text.
ONLY_END = 44
# The array that ids are collected in, the bytes of one in it (2 or 4), and how many it has.
OUT, OUT_BYTES, N_OUT = range(45, 48)
N_FIELDS = 48

# What a compiled function returns: done, or the buffer that must be enlarged or emptied before it is called again.
DONE, NEEDS_TABLE, NEEDS_IDS, NEEDS_LONG_ROOM = range(4)

# How many pre-tokens are looked up together, so that their cache misses overlap.
QUEUE = 512


@jitted
def get(state, field):
    return load_i64(state + 8 * field)


@jitted
def put(state, field, value):
    store_i64(state + 8 * field, value)


# The keys of the hash tables: two random numbers of this process. With a hash that is known beforehand, a text or a
# vocabulary can be made whose keys all begin their search at one slot, so that time grows with the square of their
# number. No result depends on these numbers.
KEY = secrets.randbits(64)
# Odd, so that a product with it loses nothing.
MULTIPLIER = secrets.randbits(64) | 1


class State:
    """A state of `n_fields` with the arrays that its addresses point to. `key` is the first of the two fields with keys
    of hash tables."""

    def __init__(self, n_fields: int, key: int) -> None:
        self.state = np.zeros(n_fields, np.int64)
        self.address = self.state.ctypes.data
        self._arrays: dict[int, NDArray] = {}
        self.state.view(np.uint64)[key : key + 2] = KEY, MULTIPLIER

    def array(self, field: int) -> NDArray:
        return self._arrays[field]

    def point(self, field: int, array: NDArray, room: int | None = None) -> None:
        """Set a field to the address of an array, and the field `room` to its length; keep the array alive."""
        self._arrays[field] = array
        self.state[field] = array.ctypes.data
        if room is not None:
            self.state[room] = len(array)
