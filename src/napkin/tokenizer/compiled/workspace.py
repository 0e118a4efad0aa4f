"""Memory for compiled functions: the arrays that a job's addresses point to, made larger as they run out.

A workspace serves one thread at a time.
"""

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.compiled import jobs
from napkin.tokenizer.compiled.cache import ENTRY_BYTES, LONGEST, move_entries
from napkin.tokenizer.compiled.character_classes import character_classes
from napkin.tokenizer.compiled.machine_code import Scanner
from napkin.tokenizer.compiled.scanners import MARGIN

# Of 65,536 entries: what a few hundred kilobytes of text need.
_FIRST_SLOTS = 2**16
_FIRST_LONG_BYTES = 2**16
_TABLE_GROWTH = 4


class Workspace:
    """A job with its arrays; `array(field)` is the array a field points to.

    The table of pre-tokens and what goes with it stay below `cache_bytes`, but for the smallest that works.
    """

    def __init__(self, scanner: Scanner, cache_bytes: int) -> None:
        self.job = np.zeros(jobs.N_FIELDS, np.int64)
        self.address = self.job.ctypes.data
        self.cache_bytes = cache_bytes
        self._arrays: dict[int, NDArray] = {}
        self._scanner = scanner
        self.job[jobs.SCANNER] = scanner.address
        self.point(jobs.CLASSES, character_classes())
        self.point(jobs.ENDS, np.zeros(jobs.QUEUE + MARGIN, np.int64))
        self.point(jobs.NEW, np.zeros((jobs.QUEUE + MARGIN, 3), np.int64))
        self.point(jobs.KEYS, np.zeros((jobs.QUEUE + MARGIN, 2), np.uint64))
        self._make_table(_FIRST_SLOTS)
        self._make_long(_FIRST_LONG_BYTES)

    def array(self, field: int) -> NDArray:
        """The array whose address a field holds."""
        return self._arrays[field]

    def point(self, field: int, array: NDArray) -> None:
        """Let a field hold the address of an array, which is kept."""
        self._arrays[field] = array
        self.job[field] = array.ctypes.data

    def give_text(self, text: NDArray[np.uint8], document_ends: NDArray[np.int64], start: int = 0) -> None:
        """Begin with documents that lie one after the other in `text`, the first at `start`."""
        self.point(jobs.TEXT, text)
        self.point(jobs.DOCUMENT_ENDS, document_ends)
        self.job[jobs.LIMIT] = len(text)
        self.job[jobs.N_DOCUMENTS] = len(document_ends)
        self.job[jobs.DOCUMENT] = 0
        self.job[jobs.POSITION] = start

    def take_text(self) -> None:
        """Let go of the text."""
        self._arrays.pop(jobs.TEXT, None)

    def make_room(self, *, may_forget: bool) -> None:
        """Enlarge what is short, the table or what is beside it; where it would be too large, forget all instead."""
        job = self.job
        n_slots = int(job[jobs.N_SLOTS])
        table_bytes = n_slots * ENTRY_BYTES
        long_bytes = self.array(jobs.LONG_BYTES).nbytes + self.array(jobs.LONG_IDS).nbytes
        table_is_short = job[jobs.N_ENTRIES] + jobs.QUEUE + MARGIN > job[jobs.ENTRIES_ROOM]
        grown = table_bytes * _TABLE_GROWTH + long_bytes if table_is_short else table_bytes + 2 * long_bytes
        if may_forget and grown > self.cache_bytes:
            self.array(jobs.TABLE)[:] = 0
            for field in (jobs.N_ENTRIES, jobs.LONG_BYTES_USED, jobs.LONG_IDS_USED):
                job[field] = 0
        elif table_is_short:
            old = self.array(jobs.TABLE)
            self._make_table(n_slots * _TABLE_GROWTH)
            move_entries(old, self.array(jobs.TABLE))
        else:
            bytes_, ids = self.array(jobs.LONG_BYTES), self.array(jobs.LONG_IDS)
            self._make_long(2 * len(bytes_))
            self.array(jobs.LONG_BYTES)[: len(bytes_)] = bytes_
            self.array(jobs.LONG_IDS)[: len(ids)] = ids

    def _make_table(self, n_slots: int) -> None:
        self.point(jobs.TABLE, aligned_zeros((n_slots, ENTRY_BYTES // 8)))
        self.job[jobs.N_SLOTS] = n_slots
        self.job[jobs.ENTRIES_ROOM] = n_slots // 8 * 5

    def _make_long(self, n_bytes: int) -> None:
        self.point(jobs.LONG_BYTES, np.empty(n_bytes, np.uint8))
        self.point(jobs.LONG_IDS, np.empty(n_bytes + LONGEST, np.uint32))
        self.job[jobs.LONG_BYTES_ROOM] = n_bytes
        self.job[jobs.LONG_IDS_ROOM] = n_bytes


def aligned_zeros(shape: tuple[int, int]) -> NDArray[np.uint64]:
    """Zeros that begin at a line of the processor's cache, so that no entry lies on two."""
    size = shape[0] * shape[1]
    memory = np.zeros(size + 7, np.uint64)
    begin = -memory.ctypes.data % 64 // 8
    return memory[begin : begin + size].reshape(shape)
