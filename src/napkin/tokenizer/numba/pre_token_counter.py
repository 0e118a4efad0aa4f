"""Counting pre-tokens with the compiled core, in several threads.

Memory is that of the distinct pre-tokens and of the texts being counted. The counts do not depend on the number of
threads or on where the texts were split.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba.count_documents import add_counts, count_documents, count_symbols, list_words
from napkin.tokenizer.numba.dispatch import CORE, modules_for_training, scanner_of
from napkin.tokenizer.numba.workspace import Workspace
from napkin.tokenizer.text_input import SPLITTABLE_PATTERNS, Piece, split_into_pieces
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION

_PIECE_BYTES = 2**22


class PreTokenCounter:
    """Counts pre-tokens in up to `threads` threads. Plain twin: `count_pre_tokens`.

    `add` may be called from one thread only.
    """

    def __init__(self, pattern: str, threads: int, unicode_version: str = DEFAULT_VERSION) -> None:
        self._unicode_version = unicode_version
        CORE.load(*modules_for_training(pattern))
        self._scanner = scanner_of(pattern)
        self._may_split = pattern in SPLITTABLE_PATTERNS
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
        for piece in split_into_pieces(text, ends, _PIECE_BYTES, split_documents=self._may_split):
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
        table = self._tables[0] if self._tables else Workspace(self._scanner, 0, self._unicode_version)
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
                table = Workspace(self._scanner, 0, self._unicode_version)
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
        table.release_text()
        with self._lock:
            self._idle.append(table)


def _add_table(table: Workspace, other: Workspace) -> None:
    slot, n_slots = 0, int(other.state[fields.N_SLOTS])
    addresses = int(other.state[fields.TABLE]), n_slots, int(other.state[fields.LONG_BYTES])
    while (slot := add_counts(table.address, *addresses, slot)) < n_slots:
        table.make_room(may_clear=False)
