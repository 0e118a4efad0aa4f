"""Training with the compiled core: words are counted in several threads, merges learned in one.

Memory is that of the distinct pre-tokens and of the texts that are being counted. What is learned depends on the counts
alone, so it is the same for any number of threads and wherever the texts were divided.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.compiled import jobs, learning, pairs
from napkin.tokenizer.compiled.counting import add_counts, count_documents, count_symbols, list_words
from napkin.tokenizer.compiled.cuts import CUTTABLE_PATTERNS, Piece, pieces_of
from napkin.tokenizer.compiled.loading import load, parts_for_training, scanner_of
from napkin.tokenizer.compiled.workspace import Workspace

_PIECE_BYTES = 2**22


class Counts:
    """How often each pre-token occurs, counted in up to `threads` threads. Plain twin: a Counter.

    `add` may be called from one thread only.
    """

    def __init__(self, pattern: str, threads: int) -> None:
        load(*parts_for_training(pattern))
        self._scanner = scanner_of(pattern)
        self._cuts = pattern in CUTTABLE_PATTERNS
        self._threads = threads
        self._tables: list[Workspace] = []
        self._idle: list[Workspace] = []
        # Pre-tokens too long for a table.
        self._long: Counter[bytes] = Counter()
        self._adding = threading.Lock()
        self._pool = ThreadPoolExecutor(threads)
        self._running: set[Future[None]] = set()

    def add(self, text: bytes, document_ends: Sequence[int]) -> None:
        """Count documents that lie in `text`, which is UTF-8, one after the other; now or soon.

        Returns when there are few enough waiting.
        """
        data = np.frombuffer(text, np.uint8)
        for piece in pieces_of(text, np.array(document_ends, np.int64), _PIECE_BYTES, cut=self._cuts):
            self._running.add(self._pool.submit(self._count, text, data, piece))
            self._wait_for(self._threads)

    def finish(self) -> None:
        """Wait for all counting and bring it together."""
        self._wait_for(0)
        self._pool.shutdown()
        while len(self._tables) > 1:
            _add_table(self._tables[0], self._tables.pop())

    def close(self) -> None:
        """Give up what has not been begun."""
        self._pool.shutdown(cancel_futures=True)

    def __bool__(self) -> bool:
        return bool(self._long) or any(table.job[jobs.N_ENTRIES] for table in self._tables)

    def words(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64]]:
        """Bytes of the distinct words, where each begins and the last ends, and how often each occurs."""
        table = self._tables[0] if self._tables else Workspace(self._scanner, 0)
        entries = table.array(jobs.TABLE)
        long_bytes = sum(map(len, self._long))
        n_entries = int(table.job[jobs.N_ENTRIES])
        n_symbols = count_symbols(entries)
        symbols = np.empty(n_symbols + long_bytes, np.uint32)
        starts = np.empty(n_entries + len(self._long) + 1, np.uint32)
        counts = np.empty(n_entries + len(self._long), np.int64)
        n_words = list_words(entries, table.array(jobs.LONG_BYTES), symbols, starts, counts)
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
        with self._adding:
            if self._idle:
                table = self._idle.pop()
            else:
                table = Workspace(self._scanner, 0)
                self._tables.append(table)
        table.give_text(data, piece.document_ends, piece.start)
        while (status := count_documents(table.address)) != jobs.DONE:
            if status == jobs.NEEDS_TABLE:
                table.make_room(may_forget=False)
                continue
            start = int(table.job[jobs.POSITION])
            end = start + int(table.job[jobs.NEEDED_BYTES])
            with self._adding:
                self._long[bytes(text[start:end])] += 1
            table.job[jobs.POSITION] = end
        table.take_text()
        with self._adding:
            self._idle.append(table)


def _add_table(table: Workspace, other: Workspace) -> None:
    slot, n_slots = 0, int(other.job[jobs.N_SLOTS])
    addresses = int(other.job[jobs.TABLE]), n_slots, int(other.job[jobs.LONG_BYTES])
    while (slot := add_counts(table.address, *addresses, slot)) < n_slots:
        table.make_room(may_forget=False)


def learn_compiled(
    words: tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64]],
    n_merges: int,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    *,
    merges_a_report: int = 256,
    threshold: int | None = None,
) -> list[tuple[int, int]]:
    """The first `n_merges` merges for words as `Counts.words` gives them, fewer where no pair is left.

    Pairs rarer than `threshold` are left out of all bookkeeping until none as frequent is left; by itself it is a guess
    of how frequent the last merge will be, on the safe side. Plain twin: `learn_merges`.
    """
    learner = _Learner(*words, n_merges, threshold)
    done = 0
    while done < n_merges:
        reached = learner.learn(min(done + merges_a_report, n_merges))
        if reached == done:
            break
        done = reached
        if done % merges_a_report == 0:
            progress("merging", done, n_merges)
    progress("merging", done, done)
    return [(first, second) for first, second in learner.merges[:done].tolist()]


class _Learner:
    """The job of learning.py with its arrays."""

    def __init__(
        self,
        symbols: NDArray[np.uint32],
        starts: NDArray[np.uint32],
        counts: NDArray[np.int64],
        n_merges: int,
        threshold: int | None,
    ) -> None:
        self.job = np.zeros(pairs.N_FIELDS, np.int64)
        self.address = self.job.ctypes.data
        self._arrays: dict[int, NDArray] = {}
        lengths = np.diff(starts)
        self._point(pairs.SYMBOLS, symbols)
        self._point(pairs.STARTS, starts)
        self._point(pairs.LENGTHS, lengths)
        self._point(pairs.COUNTS, counts)
        self.job[pairs.N_WORDS] = len(counts)
        vocab_size = 256 + n_merges
        self.merges = np.empty((n_merges, 2), np.int64)
        self._point(pairs.MERGES, self.merges)
        token_starts = np.zeros(vocab_size + 1, np.int64)
        token_starts[:257] = np.arange(257)
        prefixes = np.zeros(vocab_size, np.uint64)
        prefixes[:256] = np.arange(256, dtype=np.uint64) << np.uint64(56)
        self._point(pairs.TOKEN_STARTS, token_starts)
        self._point(pairs.TOKEN_PREFIXES, prefixes)
        self._give(pairs.TOKEN_BYTES, pairs.TOKEN_BYTES_ROOM, np.arange(max(256, 8 * vocab_size)).astype(np.uint8))
        for field in (pairs.BEFORE, pairs.BEHIND):
            self._point(field, np.full(vocab_size, pairs.NONE, np.uint32))
        self._point(pairs.RENUMBERED, np.empty(2 * vocab_size + 1, np.uint32))
        self._give(pairs.NOTES, pairs.NOTES_ROOM, np.empty((2**12, 2), np.uint32))
        self._give(pairs.LISTS, pairs.LISTS_ROOM, np.empty(len(symbols), np.uint32))
        self._give_pairs(2**16)
        if threshold is None:
            n_occurrences = int((counts * (lengths - np.uint32(1))).sum()) if len(counts) else 0
            threshold = n_occurrences // (128 * max(n_merges, 1))
        self.job[pairs.THRESHOLD] = max(threshold, 1)
        self._index()

    def learn(self, until: int) -> int:
        """Learn merges until there are so many, or no pair is left; how many there are."""
        job = self.job
        while (status := learning.learn(self.address, until)) != jobs.DONE:
            if status != learning.EXHAUSTED:
                self._make_room(status)
            elif job[pairs.THRESHOLD] == 1:
                break
            else:
                job[pairs.THRESHOLD] = max(1, int(job[pairs.THRESHOLD]) // 16)
                self._index()
        return int(job[pairs.N_MERGES])

    def _index(self) -> None:
        while (status := learning.index_pairs(self.address)) != jobs.DONE:
            self._make_room(status)

    def _make_room(self, status: int) -> None:
        job = self.job
        if status == learning.NEEDS_PAIRS:
            self._give_pairs(2 * int(job[pairs.PAIRS_ROOM]))
            return
        field, room = {
            learning.NEEDS_LISTS: (pairs.LISTS, pairs.LISTS_ROOM),
            learning.NEEDS_NOTES: (pairs.NOTES, pairs.NOTES_ROOM),
            learning.NEEDS_TOKEN_BYTES: (pairs.TOKEN_BYTES, pairs.TOKEN_BYTES_ROOM),
        }[status]
        old = self._arrays[field]
        wanted = {pairs.NOTES: job[pairs.N_NOTES], pairs.LISTS: job[pairs.LISTS_USED]}.get(field, 0)
        new = np.empty((max(2 * len(old), int(wanted)), *old.shape[1:]), old.dtype)
        new[: len(old)] = old
        self._give(field, room, new)

    def _give_pairs(self, room: int) -> None:
        fields, heap = np.empty((room, 6), np.int64), np.empty((room, 2), np.int64)
        n_slots = 4 * room
        if pairs.PAIRS in self._arrays:
            fields[: self.job[pairs.N_PAIRS]] = self._arrays[pairs.PAIRS][: self.job[pairs.N_PAIRS]]
            heap[: self.job[pairs.N_HEAP]] = self._arrays[pairs.HEAP][: self.job[pairs.N_HEAP]]
        self._point(pairs.PAIRS, fields)
        self._point(pairs.HEAP, heap)
        self._point(pairs.PAIR_SLOTS, np.empty(n_slots, np.uint32))
        self.job[pairs.PAIRS_ROOM] = room
        self.job[pairs.N_PAIR_SLOTS] = n_slots
        pairs.enter_pairs(self.address)

    def _give(self, field: int, room: int, array: NDArray) -> None:
        self._point(field, array)
        self.job[room] = len(array)

    def _point(self, field: int, array: NDArray) -> None:
        self._arrays[field] = array
        self.job[field] = array.ctypes.data
