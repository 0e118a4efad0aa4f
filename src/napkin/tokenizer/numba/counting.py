"""Counting pre-tokens with the compiled core, in several threads.

Plain twin: a Counter over `PreTokenizer.split`, document by document. The table is that of pre_token_table.py; the
first word of a value is the count, the second is unused. Memory is that of the distinct pre-tokens and of the texts
being counted. The counts do not depend on the number of threads or on where the texts were split.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

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
from napkin.tokenizer.numba.dispatch import CORE, FOR_TRAINING
from napkin.tokenizer.numba.fields import get, put
from napkin.tokenizer.numba.pre_token_table import (
    ENTRY_BYTES,
    INLINE_BYTES,
    KEY_BYTES,
    TOO_LONG,
    Workspace,
    fill_queue,
    find,
    is_entry_of,
)
from napkin.tokenizer.numba.scanners import MARGIN
from napkin.tokenizer.text_input import SPLITTABLE_PATTERNS, Piece, find_split_before, split_into_pieces
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION

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
    text, ends, key = get(state, fields.TEXT), get(state, fields.ENDS), get(state, fields.KEYS)
    start, status = get(state, fields.POSITION), fields.DONE
    for i in range(count):
        end = load_i64(ends + 8 * i)
        low, high, entry = load_u64(key), load_u64(key + 8), load_i64(key + 16)
        key += KEY_BYTES
        if is_entry_of(entry, low, high):
            store_i64(entry + 16, load_i64(entry + 16) + 1)
            start = end
            continue
        if high == TOO_LONG:
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


_PIECE_BYTES = 2**22


class PreTokenCounter:
    """Counts pre-tokens in up to `threads` threads. Plain twin: `count_pre_tokens`.

    `add` may be called from one thread only.
    """

    def __init__(self, pattern: str, threads: int, unicode_version: str = DEFAULT_VERSION) -> None:
        self._unicode_version = unicode_version
        CORE.load(*FOR_TRAINING)
        self._pattern = pattern
        self._threads = threads
        self._tables: list[Workspace] = []
        self._idle: list[Workspace] = []
        # Pre-tokens that are too long for a table.
        self._long: Counter[bytes] = Counter()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads)
        self._running: set[Future[None]] = set()

    def add(self, text: bytes, document_ends: Sequence[int]) -> None:
        """Schedule the documents that follow one another in `text`, UTF-8, for counting.

        Blocks while too many are waiting.
        """
        data = np.frombuffer(text, np.uint8)
        ends = np.array(document_ends, np.int64)
        find = find_split_before if self._pattern in SPLITTABLE_PATTERNS else None
        for piece in split_into_pieces(text, ends, _PIECE_BYTES, find):
            self._running.add(self._pool.submit(self._count, text, data, piece))
            self._wait_for(self._threads)

    def finish(self) -> None:
        """Wait for all counting, and combine the counts of the threads."""
        self._wait_for(0)
        self._pool.shutdown()
        while len(self._tables) > 1:
            _add_table(self._tables[0], self._tables.pop())

    def close(self) -> None:
        """Cancel what has not begun yet."""
        self._pool.shutdown(cancel_futures=True)

    def __bool__(self) -> bool:
        return bool(self._long) or any(table.state[fields.N_ENTRIES] for table in self._tables)

    def words(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64]]:
        """The bytes of the distinct words, the start of each and the end of the last, and how often each occurs."""
        table = self._tables[0] if self._tables else Workspace(self._pattern, 0, self._unicode_version)
        entries = int(table.state[fields.TABLE]), int(table.state[fields.N_SLOTS])
        long_bytes = sum(map(len, self._long))
        n_entries = int(table.state[fields.N_ENTRIES])
        n_symbols = count_symbols(*entries)
        symbols = np.empty(n_symbols + long_bytes, np.uint32)
        starts = np.empty(n_entries + len(self._long) + 1, np.uint32)
        counts = np.empty(n_entries + len(self._long), np.int64)
        written = (symbols.ctypes.data, starts.ctypes.data, counts.ctypes.data)
        n_words = list_words(*entries, int(table.state[fields.LONG_BYTES]), *written)
        end = n_symbols
        for word, count in self._long.items():
            symbols[end : end + len(word)] = np.frombuffer(word, np.uint8)
            counts[n_words] = count
            end, n_words = end + len(word), n_words + 1
            starts[n_words] = end
        self._tables.clear()
        self._long.clear()
        return symbols, starts[: n_words + 1], counts[:n_words]

    def _wait_for(self, n_waiting: int) -> None:
        while len(self._running) > n_waiting:
            done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    def _count(self, text: bytes, data: NDArray[np.uint8], piece: Piece) -> None:
        with self._lock:
            if self._idle:
                table = self._idle.pop()
            else:
                table = Workspace(self._pattern, 0, self._unicode_version)
                self._tables.append(table)
        table.set_text(data, piece.document_ends, piece.start)
        while (status := count_documents(table.address)) != fields.DONE:
            if status == fields.NEEDS_TABLE:
                table.make_room(may_clear=False)
                continue
            start = int(table.state[fields.POSITION])
            end = start + int(table.state[fields.NEEDED_BYTES])
            with self._lock:
                self._long[bytes(text[start:end])] += 1
            table.state[fields.POSITION] = end
        table.release()
        with self._lock:
            self._idle.append(table)


def _add_table(table: Workspace, other: Workspace) -> None:
    slot, n_slots = 0, int(other.state[fields.N_SLOTS])
    addresses = int(other.state[fields.TABLE]), n_slots, int(other.state[fields.LONG_BYTES])
    while (slot := add_counts(table.address, *addresses, slot)) < n_slots:
        table.make_room(may_clear=False)
