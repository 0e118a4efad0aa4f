"""Memory for compiled functions: the arrays that the addresses in a state point to, enlarged when they are full.

A workspace serves one thread at a time.
"""

import numpy as np
from numpy.typing import NDArray

from napkin.machine_code.compiled_function import CompiledFunction
from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba.character_classes import character_classes
from napkin.tokenizer.numba.hash_keys import set_hash_keys
from napkin.tokenizer.numba.pre_token_table import ENTRY_BYTES, LONGEST, move_entries
from napkin.tokenizer.numba.scanners import MARGIN
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION

# Enough for a few hundred kilobytes of text.
_FIRST_SLOTS = 2**16
_FIRST_LONG_BYTES = 2**16
_TABLE_GROWTH = 4
# The first offset in LONG_BYTES is not 0: with an offset, the entry of a long pre-token differs from any key that is
# searched for, so that its bytes are always compared.
_FIRST_PLACE = 1


class Workspace:
    """A state (see fields.py) with its arrays.

    The table of pre-tokens with its LONG_BYTES and LONG_IDS stays below `cache_bytes`, but never below its first size.
    """

    def __init__(self, scanner: CompiledFunction, cache_bytes: int, unicode_version: str = DEFAULT_VERSION) -> None:
        self.state = np.zeros(fields.N_FIELDS, np.int64)
        self.address = self.state.ctypes.data
        self.cache_bytes = cache_bytes
        self._arrays: dict[int, NDArray] = {}
        self._scanner = scanner
        self.state[fields.SCANNER] = scanner.address
        set_hash_keys(self.state, fields.HASH_KEY, fields.HASH_MULTIPLIER)
        self.point(fields.CLASSES, character_classes(unicode_version))
        self.point(fields.ENDS, np.zeros(fields.QUEUE + MARGIN, np.int64))
        self.point(fields.NEW, np.zeros((fields.QUEUE + MARGIN, 3), np.int64))
        self.point(fields.KEYS, np.zeros((fields.QUEUE + MARGIN, 2), np.uint64))
        self._allocate_table(_FIRST_SLOTS)
        self._allocate_long(_FIRST_LONG_BYTES)
        self.state[fields.LONG_BYTES_USED] = _FIRST_PLACE

    def array(self, field: int) -> NDArray:
        return self._arrays[field]

    def point(self, field: int, array: NDArray) -> None:
        """Set a field to the address of an array, and keep the array alive."""
        self._arrays[field] = array
        self.state[field] = array.ctypes.data

    def set_text(self, text: NDArray[np.uint8], document_ends: NDArray[np.int64], start: int = 0) -> None:
        """Begin with the documents that follow one another in `text`, the first at `start`."""
        self.point(fields.TEXT, text)
        self.point(fields.DOCUMENT_ENDS, document_ends)
        self.state[fields.LIMIT] = len(text)
        self.state[fields.N_DOCUMENTS] = len(document_ends)
        self.state[fields.DOCUMENT] = 0
        self.state[fields.POSITION] = start

    def release_text(self) -> None:
        self._arrays.pop(fields.TEXT, None)

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
        self.point(fields.TABLE, aligned_zeros((n_slots, ENTRY_BYTES // 8)))
        self.state[fields.N_SLOTS] = n_slots
        self.state[fields.ENTRIES_ROOM] = n_slots // 8 * 5

    def _allocate_long(self, n_bytes: int) -> None:
        self.point(fields.LONG_BYTES, np.empty(n_bytes, np.uint8))
        self.point(fields.LONG_IDS, np.empty(n_bytes + LONGEST, np.uint32))
        self.state[fields.LONG_BYTES_ROOM] = n_bytes
        self.state[fields.LONG_IDS_ROOM] = n_bytes


def aligned_zeros(shape: tuple[int, int]) -> NDArray[np.uint64]:
    """Zeros aligned to a cache line of 64 bytes, so that no entry straddles two."""
    size = shape[0] * shape[1]
    memory = np.zeros(size + 7, np.uint64)
    begin = -memory.ctypes.data % 64 // 8
    return memory[begin : begin + size].reshape(shape)
