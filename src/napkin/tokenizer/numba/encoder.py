"""Encoding with the compiled core: long texts and many documents, in one thread or several.

Each thread has its own workspace with its own table of pre-tokens. Only the vocabulary is shared, so the ids do not
depend on the number of threads.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from napkin.tokenizer.numba import fields, hash_keys
from napkin.tokenizer.numba.apply_merges import NEVER, NO_ID, SHORT_ROOM, fill_pairs
from napkin.tokenizer.numba.dispatch import CORE, modules_for_encoding, scanner_of
from napkin.tokenizer.numba.encode_documents import IDS_MARGIN, encode_documents
from napkin.tokenizer.numba.workspace import Workspace, aligned_zeros
from napkin.tokenizer.text_input import SPLITTABLE_PATTERNS, split_into_pieces
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION

CACHE_BYTES = 2**26

_SCRATCH_IDS = 2**16
_PIECE_BYTES = 2**20


class Encoder:
    """Encodes UTF-8 bytes with the merges and the pattern of a BPETokenizer, without special tokens.

    `cache_bytes` bounds the table of pre-tokens of each thread. Plain twin: `BPETokenizer._encode_ordinary`.
    """

    def __init__(
        self,
        merges: Sequence[tuple[int, int]],
        pattern: str,
        *,
        cache_bytes: int = CACHE_BYTES,
        unicode_version: str = DEFAULT_VERSION,
    ) -> None:
        self._arguments = (merges, pattern, cache_bytes, unicode_version)
        self._unicode_version = unicode_version
        CORE.load(*modules_for_encoding(pattern))
        self._scanner = scanner_of(pattern)
        self._may_split = pattern in SPLITTABLE_PATTERNS
        self._cache_bytes = cache_bytes
        self._vocabulary = _Vocabulary(merges)
        self._idle: list[Workspace] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy builds its own buffers: addresses are valid in the original only.
        return _rebuild, self._arguments

    def encode(
        self,
        text: bytes,
        document_ends: Sequence[int] | None = None,
        *,
        dtype: Literal["uint16", "uint32"] = "uint32",
        threads: int = 1,
    ) -> tuple[NDArray, NDArray[np.int64]]:
        """The ids of all documents, of shape [n_ids], and the number of ids of each, of shape [n_documents].

        The documents follow one another in `text` and end at `document_ends`; None means a single document. The dtype
        uint16 is enough for a vocabulary of up to 65,536.
        """
        ends = np.array([len(text)] if document_ends is None else document_ends, np.int64)
        data = np.frombuffer(text, np.uint8)
        n_ids = np.zeros(len(ends), np.int64)
        # A token has at least one byte. Pages that are never written take no memory.
        ids = np.empty(len(data), dtype)
        size = _PIECE_BYTES if threads > 1 else len(text)
        pieces = split_into_pieces(text, ends, size, split_documents=self._may_split)
        ordered = _OrderedOutput(ids)

        def encode_piece(workspace: Workspace, number: int) -> None:
            piece = pieces[number]
            workspace.set_text(data, piece.document_ends, piece.start)
            counts = np.zeros(piece.n_documents, np.int64)
            for some in _encode(workspace, counts):
                ordered.add(number, some)
            ordered.end(number)
            with adding:
                n_ids[piece.first_document : piece.first_document + piece.n_documents] += counts

        adding = threading.Lock()
        self._run_on_threads(encode_piece, len(pieces), threads)
        ids.resize(ordered.length, refcheck=False)
        return ids, n_ids

    def _run_on_threads(self, work: Callable[[Workspace, int], None], n_pieces: int, threads: int) -> None:
        numbers = itertools.count()

        def serve() -> None:
            with self._workspace() as workspace:
                # next() on a count is atomic under the GIL.
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
            workspace = Workspace(self._scanner, self._cache_bytes, self._unicode_version)
            self._vocabulary.give_to(workspace)
            workspace.point(fields.IDS, np.empty(_SCRATCH_IDS, np.uint32))
            workspace.state[fields.IDS_ROOM] = _SCRATCH_IDS
            _set_long_room(workspace, 255)
        try:
            yield workspace
        finally:
            workspace.release_text()
            self._idle.append(workspace)


class _Vocabulary:
    """The merges as lookup tables."""

    def __init__(self, merges: Sequence[tuple[int, int]]) -> None:
        self.size = 256 + len(merges)
        # Three of the eight slots of a bucket are taken on average.
        bits = max(1, (len(merges) // 4).bit_length())
        self.shift = 64 - bits
        self.byte_pairs = np.full(2**16, NEVER, np.uint32)
        self.pairs = aligned_zeros((2**bits, 8))
        array = np.array(merges, np.int64).reshape(-1, 2)
        byte_pairs, pairs = self.byte_pairs.ctypes.data, self.pairs.ctypes.data
        multiplier = hash_keys.MULTIPLIER
        fill_pairs(array.ctypes.data, len(array), byte_pairs, pairs, len(self.pairs), multiplier, self.shift)

    def give_to(self, workspace: Workspace) -> None:
        workspace.point(fields.BYTE_PAIRS, self.byte_pairs)
        workspace.point(fields.PAIRS, self.pairs)
        workspace.state[fields.N_BUCKETS] = len(self.pairs)
        workspace.state[fields.PAIRS_SHIFT] = self.shift
        workspace.state[fields.VOCABULARY] = self.size
        workspace.point(fields.SHORT_IDS, np.full(2 * SHORT_ROOM, NO_ID, np.uint32))
        workspace.point(fields.SHORT_RANKS, np.zeros(2 * SHORT_ROOM, np.uint32))
        workspace.point(fields.RANKS, np.full((self.size, 2), NEVER, np.uint32))
        workspace.point(fields.RANK_BITS, np.zeros(self.size // 64 + 1, np.uint64))


class _OrderedOutput:
    """The ids of numbered pieces, written to `ids` in the order of the pieces, whichever thread finishes first.

    The first unfinished piece is written to `ids` directly, only later ones are buffered. So little memory is touched
    besides `ids`: a page fault costs as much time as encoding a few hundred bytes.
    """

    def __init__(self, ids: NDArray) -> None:
        self._ids = ids
        self.length = 0
        self._turn = 0
        self._waiting: dict[int, list[NDArray]] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def add(self, number: int, ids: NDArray) -> None:
        """Append ids to piece `number`; they are copied."""
        with self._lock:
            if number == self._turn:
                self._append(ids)
            else:
                self._waiting.setdefault(number, []).append(ids.astype(self._ids.dtype))

    def end(self, number: int) -> None:
        """Mark piece `number` as complete."""
        with self._lock:
            self._ended.add(number)
            while self._turn in self._ended:
                self._turn += 1
                for ids in self._waiting.pop(self._turn, []):
                    self._append(ids)

    def _append(self, ids: NDArray) -> None:
        self._ids[self.length : self.length + len(ids)] = ids
        self.length += len(ids)


def _encode(workspace: Workspace, n_ids: NDArray[np.int64]) -> Iterator[NDArray[np.uint32]]:
    """Encode the workspace's text. Yields ids, each array valid until the next; fills `n_ids` for each document."""
    state = workspace.state
    workspace.point(fields.N_IDS_BY_DOCUMENT, n_ids)
    while True:
        state[fields.N_IDS] = 0
        status = encode_documents(workspace.address)
        yield workspace.array(fields.IDS)[: state[fields.N_IDS]]
        if status == fields.DONE:
            return
        if status == fields.NEEDS_TABLE:
            workspace.make_room(may_clear=True)
        elif status == fields.NEEDS_LONG_ROOM:
            _set_long_room(workspace, int(state[fields.NEEDED_BYTES]))
        elif state[fields.NEEDED_BYTES] + IDS_MARGIN > state[fields.IDS_ROOM]:
            room = int(state[fields.NEEDED_BYTES]) + IDS_MARGIN
            workspace.point(fields.IDS, np.empty(room, np.uint32))
            state[fields.IDS_ROOM] = room


def _set_long_room(workspace: Workspace, n_bytes: int) -> None:
    workspace.point(fields.PLACES, np.empty((n_bytes, 6), np.uint32))
    workspace.state[fields.LONG_ROOM] = n_bytes


def _rebuild(merges: Sequence[tuple[int, int]], pattern: str, cache_bytes: int, unicode_version: str) -> Encoder:
    return Encoder(merges, pattern, cache_bytes=cache_bytes, unicode_version=unicode_version)
