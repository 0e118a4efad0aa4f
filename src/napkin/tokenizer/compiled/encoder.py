"""Encoding with the compiled core: large texts and many documents, in one thread or several.

Each thread has a workspace, with a cache of pre-tokens of its own: nothing is shared but the vocabulary, so the ids do
not depend on how many there are.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.compiled import jobs
from napkin.tokenizer.compiled.cuts import CUTTABLE_PATTERNS, pieces_of
from napkin.tokenizer.compiled.encoding import IDS_MARGIN, encode_documents
from napkin.tokenizer.compiled.loading import load, parts_for_encoding, scanner_of
from napkin.tokenizer.compiled.merging import NEVER, NO_ID, SHORT_ROOM, fill_pairs
from napkin.tokenizer.compiled.workspace import Workspace, aligned_zeros

CACHE_BYTES = 2**26

_SCRATCH_IDS = 2**16
_PIECE_BYTES = 2**20


class Encoder:
    """Encodes bytes, which must be UTF-8, by the merges and the pattern of a BPETokenizer; nothing in them is special.

    `cache_bytes` bounds the pre-tokens that each thread remembers. Twin: `BPETokenizer._encode_ordinary`.
    """

    def __init__(self, merges: Sequence[tuple[int, int]], pattern: str, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._arguments = (merges, pattern, cache_bytes)
        load(*parts_for_encoding(pattern))
        self._scanner = scanner_of(pattern)
        self._cuts = pattern in CUTTABLE_PATTERNS
        self._cache_bytes = cache_bytes
        self._vocabulary = _Vocabulary(merges)
        self._idle: list[Workspace] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # Addresses mean nothing in a copy.
        merges, pattern, cache_bytes = self._arguments
        return _rebuild, (merges, pattern, cache_bytes)

    def encode(
        self,
        text: bytes,
        document_ends: Sequence[int] | None = None,
        *,
        dtype: Literal["uint16", "uint32"] = "uint32",
        threads: int = 1,
    ) -> tuple[NDArray, NDArray[np.int64]]:
        """Ids of shape [n_ids] of all documents, one after the other, and how many each has, of shape [n_documents].

        The documents lie in `text` one after the other and end at `document_ends`; without, it is one document. uint16
        will do for up to 65536 ids.
        """
        ends = np.array([len(text)] if document_ends is None else document_ends, np.int64)
        data = np.frombuffer(text, np.uint8)
        n_ids = np.zeros(len(ends), np.int64)
        # A token has at least a byte. What is not written to takes no memory.
        ids = np.empty(len(data), dtype)
        pieces = pieces_of(text, ends, _PIECE_BYTES if threads > 1 else len(text), cut=self._cuts)
        row = _Row(ids)

        def encode_piece(workspace: Workspace, number: int) -> None:
            piece = pieces[number]
            workspace.give_text(data, piece.document_ends, piece.start)
            counts = np.zeros(piece.n_documents, np.int64)
            for some in _encode(workspace, counts):
                row.add(number, some)
            row.end(number)
            with adding:
                n_ids[piece.first_document : piece.first_document + piece.n_documents] += counts

        adding = threading.Lock()
        self._spread(encode_piece, len(pieces), threads)
        ids.resize(row.length, refcheck=False)
        return ids, n_ids

    def _spread(self, work: Callable[[Workspace, int], None], n_pieces: int, threads: int) -> None:
        numbers = itertools.count()

        def serve() -> None:
            with self._workspace() as workspace:
                # The next number is taken in one step of the interpreter.
                while (number := next(numbers)) < n_pieces:
                    work(workspace, number)

        if threads == 1 or n_pieces == 1:
            serve()
            return
        with ThreadPoolExecutor(min(threads, n_pieces)) as pool:
            for done in [pool.submit(serve) for _ in range(min(threads, n_pieces))]:
                done.result()

    @contextmanager
    def _workspace(self) -> Iterator[Workspace]:
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = Workspace(self._scanner, self._cache_bytes)
            self._vocabulary.give_to(workspace)
            workspace.point(jobs.IDS, np.empty(_SCRATCH_IDS, np.uint32))
            workspace.job[jobs.IDS_ROOM] = _SCRATCH_IDS
            _give_long_room(workspace, 255)
        try:
            yield workspace
        finally:
            workspace.take_text()
            self._idle.append(workspace)


class _Vocabulary:
    """The merges as tables."""

    def __init__(self, merges: Sequence[tuple[int, int]]) -> None:
        self.size = 256 + len(merges)
        # Three of the eight slots of a bucket are taken on average.
        bits = max(1, (len(merges) // 4).bit_length())
        self.shift = 64 - bits
        self.byte_pairs = np.full(2**16, NEVER, np.uint32)
        self.pairs = aligned_zeros((2**bits, 8))
        fill_pairs(np.array(merges, np.int64).reshape(-1, 2), self.byte_pairs, self.pairs, self.shift)

    def give_to(self, workspace: Workspace) -> None:
        workspace.point(jobs.BYTE_PAIRS, self.byte_pairs)
        workspace.point(jobs.PAIRS, self.pairs)
        workspace.job[jobs.N_BUCKETS] = len(self.pairs)
        workspace.job[jobs.PAIRS_SHIFT] = self.shift
        workspace.job[jobs.VOCABULARY] = self.size
        workspace.point(jobs.SHORT_IDS, np.full(2 * SHORT_ROOM, NO_ID, np.uint32))
        workspace.point(jobs.SHORT_RANKS, np.zeros(2 * SHORT_ROOM, np.uint32))
        workspace.point(jobs.RANKS, np.full((self.size, 2), NEVER, np.uint32))
        workspace.point(jobs.RANK_BITS, np.zeros(self.size // 64 + 1, np.uint64))


class _Row:
    """Ids of pieces, put one after the other in `ids` by the pieces' numbers, whichever thread has them first.

    The piece whose turn it is goes to its place at once, and those after it wait, so that no memory is touched but that
    of the ids: a fresh page of it costs as much time as encoding a few hundred bytes.
    """

    def __init__(self, ids: NDArray) -> None:
        self._ids = ids
        self.length = 0
        self._turn = 0
        self._waiting: dict[int, list[NDArray]] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def add(self, number: int, ids: NDArray) -> None:
        """Put ids behind those that piece `number` has so far; they are copied."""
        with self._lock:
            if number == self._turn:
                self._place(ids)
            else:
                self._waiting.setdefault(number, []).append(ids.astype(self._ids.dtype))

    def end(self, number: int) -> None:
        """Say that a piece has all its ids."""
        with self._lock:
            self._ended.add(number)
            while self._turn in self._ended:
                self._turn += 1
                for ids in self._waiting.pop(self._turn, []):
                    self._place(ids)

    def _place(self, ids: NDArray) -> None:
        self._ids[self.length : self.length + len(ids)] = ids
        self.length += len(ids)


def _encode(workspace: Workspace, n_ids: NDArray[np.int64]) -> Iterator[NDArray[np.uint32]]:
    """Encode the workspace's text: ids, each array until the next is asked for, and how many each document has."""
    job = workspace.job
    workspace.point(jobs.N_IDS_BY_DOCUMENT, n_ids)
    while True:
        job[jobs.N_IDS] = 0
        status = encode_documents(workspace.address)
        yield workspace.array(jobs.IDS)[: job[jobs.N_IDS]]
        if status == jobs.DONE:
            return
        if status == jobs.NEEDS_TABLE:
            workspace.make_room(may_forget=True)
        elif status == jobs.NEEDS_LONG_ROOM:
            _give_long_room(workspace, int(job[jobs.NEEDED_BYTES]))
        elif job[jobs.NEEDED_BYTES] + IDS_MARGIN > job[jobs.IDS_ROOM]:
            room = int(job[jobs.NEEDED_BYTES]) + IDS_MARGIN
            workspace.point(jobs.IDS, np.empty(room, np.uint32))
            job[jobs.IDS_ROOM] = room


def _give_long_room(workspace: Workspace, n_bytes: int) -> None:
    workspace.point(jobs.PLACES, np.empty((n_bytes, 6), np.uint32))
    workspace.job[jobs.LONG_ROOM] = n_bytes


def _rebuild(merges: Sequence[tuple[int, int]], pattern: str, cache_bytes: int) -> Encoder:
    return Encoder(merges, pattern, cache_bytes=cache_bytes)
