"""Encoding with the compiled core: long texts and many documents, in one thread or several.

Pre-tokens are found and looked up, and merges are applied to those seen for the first time. Each thread has its own
workspace with its own table of pre-tokens; only the vocabulary is shared, so the ids do not depend on the number of
threads. Plain twin: `merge_symbols` of each pre-token of `PreTokenizer.split`, document by document.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from napkin.machine_code.compiled_function import BEFORE_BYTES, CompiledFunction, jitted, python_function
from napkin.machine_code.pointers import (
    call_with_state,
    call_with_three,
    load_i64,
    load_u8,
    load_u32,
    load_u64,
    store_i64,
    store_u8,
    store_u32,
    store_u64,
    u16_at,
    u32_at,
)
from napkin.tokenizer.numba import fields
from napkin.tokenizer.numba.apply_merges import (
    LANES,
    NEVER,
    NO_ID,
    SHORT,
    SHORT_ROOM,
    begin_short,
    end_short,
    fill_pairs,
    is_busy,
    lane_entry,
    merge_long,
    short_ids,
    step_short,
)
from napkin.tokenizer.numba.characters import CharacterVocabulary, find_piece_end, scan_pieces
from napkin.tokenizer.numba.dispatch import CORE, FOR_ENCODING
from napkin.tokenizer.numba.fields import get, put
from napkin.tokenizer.numba.pre_token_table import (
    INLINE_BYTES,
    INLINE_IDS,
    KEY_BYTES,
    TOO_LONG,
    Workspace,
    aligned_zeros,
    fill_queue,
    find,
    is_entry_of,
)
from napkin.tokenizer.numba.scanners import MARGIN
from napkin.tokenizer.text_input import SPLITTABLE_PATTERNS, FindSplit, Piece, find_split_before, split_into_pieces
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION

# Ids are stored four at a time, even when there are fewer.
IDS_MARGIN = 4


@CompiledFunction
def encode_documents(state):
    """Encode the documents from DOCUMENT and POSITION on, until they end or a buffer is full.

    Returns DONE; NEEDS_TABLE if the table, LONG_BYTES or LONG_IDS must be enlarged or emptied; NEEDS_IDS if ids must be
    taken from IDS, or IDS enlarged to as many ids as the next pre-token has bytes; or NEEDS_LONG_ROOM if that pre-token
    is too long for the merge buffers. The last two leave its length in NEEDED_BYTES.
    """
    while get(state, fields.DOCUMENT) < get(state, fields.N_DOCUMENTS):
        document = get(state, fields.DOCUMENT)
        stop = load_i64(get(state, fields.DOCUMENT_ENDS) + 8 * document)
        before = get(state, fields.N_IDS)
        status = _encode_until(state, stop)
        if get(state, fields.N_IDS_BY_DOCUMENT):
            total = get(state, fields.N_IDS_BY_DOCUMENT) + 8 * document
            store_i64(total, load_i64(total) + get(state, fields.N_IDS) - before)
        if status != fields.DONE:
            return status
        put(state, fields.DOCUMENT, document + 1)
    return fields.DONE


@CompiledFunction
def encode_into(state, function):
    """Encode like `encode_documents`, whose address is `function`, and append the ids to OUT, of which the caller
    guarantees that there is room for them.

    IDS is emptied into OUT whenever it is full: NEEDS_IDS is returned only for a pre-token that is too long for it.
    """
    status, n_ids = fields.NEEDS_IDS, 1
    while status == fields.NEEDS_IDS and n_ids:
        put(state, fields.N_IDS, 0)
        status = call_with_state(function, state)
        n_ids = get(state, fields.N_IDS)
        _append(state, n_ids)
    return status


@jitted
def _append(state, n_ids):
    """Append the ids in IDS to OUT."""
    n_out, ids = get(state, fields.N_OUT), u32_at(get(state, fields.IDS))
    if get(state, fields.OUT_BYTES) == 2:
        narrow = u16_at(get(state, fields.OUT) + 2 * n_out)
        for i in range(n_ids):
            narrow[i] = ids[i]
    else:
        wide = u32_at(get(state, fields.OUT) + 4 * n_out)
        for i in range(n_ids):
            wide[i] = ids[i]
    put(state, fields.N_OUT, n_out + n_ids)


@CompiledFunction
def encode_short(numbers, text):
    """The list of the ids of the bytes object `text`, made by Python's C interface; empty if a buffer must be enlarged
    or emptied first.

    `numbers` are, for `builtin`: the state, the address of `encode_documents`, and those of `_PYTHON_FUNCTIONS`.
    """
    numbers += BEFORE_BYTES
    state, function = load_i64(numbers), load_i64(numbers + 8)
    n_bytes = call_with_state(load_i64(numbers + 16), text)
    put(state, fields.TEXT, call_with_state(load_i64(numbers + 24), text))
    put(state, fields.LIMIT, n_bytes)
    put(state, fields.POSITION, 0)
    put(state, fields.ONLY_END, n_bytes)
    put(state, fields.DOCUMENT_ENDS, state + 8 * fields.ONLY_END)
    put(state, fields.N_DOCUMENTS, 1)
    put(state, fields.DOCUMENT, 0)
    put(state, fields.N_IDS, 0)
    put(state, fields.N_IDS_BY_DOCUMENT, 0)
    n_ids = 0
    if call_with_state(function, state) == fields.DONE:
        n_ids = get(state, fields.N_IDS)
    made = call_with_state(load_i64(numbers + 32), n_ids)
    for i in range(n_ids if made else 0):
        number = call_with_state(load_i64(numbers + 40), load_u32(get(state, fields.IDS) + 4 * i))
        if number == 0:
            return 0
        call_with_three(load_i64(numbers + 48), made, i, number)
    return made


_PYTHON_FUNCTIONS = ("PyBytes_Size", "PyBytes_AsString", "PyList_New", "PyLong_FromLong", "PyList_SetItem")


@jitted
def _encode_until(state, stop):
    while get(state, fields.POSITION) < stop:
        if get(state, fields.N_ENTRIES) + fields.QUEUE + MARGIN > get(state, fields.ENTRIES_ROOM):
            return fields.NEEDS_TABLE
        status = _encode_queue(state, fill_queue(state, stop))
        if status != fields.DONE:
            return status
    return fields.DONE


@jitted
def _encode_queue(state, count):
    """Encode the `count` pre-tokens from POSITION on whose ends are in ENDS, or as many as there is room for.

    In three passes, so that cache misses overlap within each: look up all, merge the new ones, write all ids.
    """
    found = _find_all(state, count)
    status = fields.DONE if found == count else fields.NEEDS_TABLE
    _merge_new(state)
    written = _write_ids(state, found)
    return status if written == fields.DONE else written


@jitted
def _find_all(state, count):
    """Find the entry of each pre-token in KEYS, 0 if it is too long; returns how many were found.

    New pre-tokens get an entry, whose ids are filled in later, and are listed in NEW.
    """
    key = get(state, fields.KEYS)
    put(state, fields.N_NEW, 0)
    put(state, fields.N_RESERVED, 0)
    for i in range(count):
        if not is_entry_of(load_i64(key + 16), load_u64(key), load_u64(key + 8)):
            entry = _find_or_add(state, i, load_u64(key), load_u64(key + 8))
            if entry < 0:
                return i
            store_i64(key + 16, entry)
        key += KEY_BYTES
    return count


@jitted
def _find_or_add(state, i, low, high):
    """The entry of pre-token i of the queue, a new one if it has none; 0 if it is too long, -1 if there is no room."""
    if high == TOO_LONG:
        return 0
    ends = get(state, fields.ENDS) + 8 * i
    text, start = get(state, fields.TEXT), load_i64(ends - 8)
    n_bytes = load_i64(ends) - start
    entry = find(state, text, start, low, high)
    if load_u64(entry + 8) != _ZERO:
        return entry
    n_new, used = get(state, fields.N_NEW), get(state, fields.LONG_BYTES_USED)
    # A pre-token has at most as many ids as bytes.
    reserved = get(state, fields.N_RESERVED) + n_bytes
    if reserved > get(state, fields.LONG_IDS_ROOM) - get(state, fields.LONG_IDS_USED):
        return -1
    if n_bytes > INLINE_BYTES:
        if used + n_bytes > get(state, fields.LONG_BYTES_ROOM):
            return -1
        for k in range(n_bytes):
            store_u8(get(state, fields.LONG_BYTES) + used + k, load_u8(text + start + k))
        high |= np.uint64(used)
        put(state, fields.LONG_BYTES_USED, used + n_bytes)
    store_u64(entry, low)
    store_u64(entry + 8, high)
    new = get(state, fields.NEW) + 24 * n_new
    store_i64(new, entry)
    store_i64(new + 8, text + start)
    store_i64(new + 16, n_bytes)
    put(state, fields.N_RESERVED, reserved)
    put(state, fields.N_NEW, n_new + 1)
    put(state, fields.N_ENTRIES, get(state, fields.N_ENTRIES) + 1)
    return entry


@jitted
def _merge_new(state):
    """Compute the ids of the pre-tokens in NEW, several short ones in turns."""
    upcoming, busy = 0, 0
    for lane in range(LANES):
        upcoming = _begin_next(state, lane, upcoming)
        busy += is_busy(state, lane)
    while busy:
        for lane in range(LANES):
            if is_busy(state, lane):
                n_ids = step_short(state, lane)
                if n_ids:
                    _remember(state, lane_entry(state, lane), short_ids(state, lane), n_ids)
                    upcoming = _begin_next(state, lane, upcoming)
                    busy -= not is_busy(state, lane)


@jitted
def _begin_next(state, lane, number):
    """Begin merging the next short pre-token in NEW from `number` on in a lane, merging long ones before it; returns
    the number of the one after it. Without any, the lane is idle."""
    while number < get(state, fields.N_NEW):
        new = get(state, fields.NEW) + 24 * number
        entry, text, n_bytes = load_i64(new), load_i64(new + 8), load_i64(new + 16)
        number += 1
        if n_bytes <= SHORT:
            begin_short(state, lane, entry, text, n_bytes)
            return number
        address = get(state, fields.LONG_IDS) + 4 * get(state, fields.LONG_IDS_USED)
        _remember(state, entry, address, merge_long(state, text, n_bytes, address))
    end_short(state, lane)
    return number


@jitted
def _remember(state, entry, ids, n_ids):
    """Store ids in an entry, or in LONG_IDS if there are too many."""
    count = np.uint64(n_ids) << _24
    if n_ids <= INLINE_IDS:
        # Values after the last id are copied too; in the output the next ids overwrite them.
        store_u64(entry + 16, count | np.uint64(load_u32(ids)) | load_u64(ids + 4) << _32)
        store_u64(entry + 24, load_u64(ids + 8))
        return
    place = get(state, fields.LONG_IDS_USED)
    for k in range(n_ids):
        store_u32(get(state, fields.LONG_IDS) + 4 * (place + k), load_u32(ids + 4 * k))
    put(state, fields.LONG_IDS_USED, place + n_ids)
    store_u64(entry + 16, count | np.uint64(place) << _32)


@jitted
def _write_ids(state, count):
    """Write the ids of the queue, and move POSITION past the last pre-token for which there was room."""
    if count == 0:
        return fields.DONE
    ends, key = get(state, fields.ENDS), get(state, fields.KEYS)
    out = get(state, fields.IDS) + 4 * get(state, fields.N_IDS)
    room = get(state, fields.IDS) + 4 * (get(state, fields.IDS_ROOM) - IDS_MARGIN)
    status, done = fields.DONE, count
    if_all = out + 4 * (load_i64(ends + 8 * (count - 1)) - load_i64(ends - 8)) <= room
    for i in range(count):
        entry = load_i64(key + 16)
        key += KEY_BYTES
        if not if_all or entry == 0:
            n_bytes = load_i64(ends + 8 * i) - load_i64(ends + 8 * i - 8)
            if out + 4 * n_bytes > room or (entry == 0 and n_bytes > get(state, fields.LONG_ROOM)):
                status = fields.NEEDS_IDS if out + 4 * n_bytes > room else fields.NEEDS_LONG_ROOM
                put(state, fields.NEEDED_BYTES, n_bytes)
                done = i
                break
            if entry == 0:
                text = get(state, fields.TEXT) + load_i64(ends + 8 * i - 8)
                out += 4 * merge_long(state, text, n_bytes, out)
                continue
        first = load_u64(entry + 16)
        n_ids = np.int64((first >> _24) & _LOW_8)
        store_u64(out, first & _ALL_BUT_COUNT)
        store_u64(out + 8, load_u64(entry + 24))
        if n_ids > INLINE_IDS:
            place = get(state, fields.LONG_IDS) + 4 * np.int64(first >> _32)
            for k in range(n_ids):
                store_u32(out + 4 * k, load_u32(place + 4 * k))
        out += 4 * n_ids
    put(state, fields.N_IDS, (out - get(state, fields.IDS)) >> 2)
    put(state, fields.POSITION, load_i64(ends + 8 * (done - 1)))
    return status


_ZERO, _24, _32, _LOW_8 = np.uint64(0), np.uint64(24), np.uint64(32), np.uint64(2**8 - 1)
_ALL_BUT_COUNT = np.uint64(2**64 - 1 - (0xFF << 24))


CACHE_BYTES = 2**26

_SCRATCH_IDS = 2**16
_PIECE_BYTES = 2**20


class Encoder:
    """Encodes UTF-8 bytes with the merges and the pattern of a BPETokenizer, without special tokens.

    `cache_bytes` bounds the table of pre-tokens of each thread. With `characters`, ids are the symbols of that
    vocabulary, `merges` are empty and the pattern is "whole". Plain twin: `BPETokenizer._encode_ordinary`.
    """

    def __init__(
        self,
        merges: Sequence[tuple[int, int]],
        pattern: str,
        *,
        cache_bytes: int = CACHE_BYTES,
        unicode_version: str = DEFAULT_VERSION,
        characters: CharacterVocabulary | None = None,
    ) -> None:
        self._merges, self._pattern, self._characters = merges, pattern, characters
        self._cache_bytes, self._unicode_version = cache_bytes, unicode_version
        CORE.load(*FOR_ENCODING)
        self._vocabulary = _Vocabulary(merges, characters)
        self._idle: list[_EncodingWorkspace] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy builds its own buffers: addresses are valid in the original only.
        settings = {
            "cache_bytes": self._cache_bytes,
            "unicode_version": self._unicode_version,
            "characters": self._characters,
        }
        return partial(Encoder, **settings), (self._merges, self._pattern)

    def encode_short(self, text: bytes) -> list[int]:
        """The ids of one text as `encode` gives them, with little overhead for a few words; other threads wait."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            return self.encode(text)[0].tolist()
        ids = workspace.encode_short(text)
        self._idle.append(workspace)
        return ids or self.encode(text)[0].tolist()

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
        pieces = split_into_pieces(text, ends, _PIECE_BYTES, self._find_split) if threads > 1 else []
        if len(pieces) > 1:
            length = self._encode_pieces(data, pieces, ids, n_ids, threads)
        else:
            with self._workspace() as workspace:
                workspace.set_text(data, ends)
                length = _encode(workspace, ids, n_ids)
        ids.resize(length, refcheck=False)
        return ids, n_ids

    def _encode_pieces(
        self, data: NDArray[np.uint8], pieces: list[Piece], ids: NDArray, n_ids: NDArray[np.int64], threads: int
    ) -> int:
        """Encode pieces in several threads; fills `ids`, of which it returns the number, and `n_ids`."""
        ordered, numbers, adding = _OrderedOutput(ids), itertools.count(), threading.Lock()

        def serve() -> None:
            room = np.empty(0, ids.dtype)
            with self._workspace() as workspace:
                # next() on a count is atomic under the GIL.
                while (number := next(numbers)) < len(pieces):
                    piece = pieces[number]
                    if len(room) < piece.stop - piece.start:
                        room = np.empty(piece.stop - piece.start, ids.dtype)
                    workspace.set_text(data, piece.document_ends, piece.start)
                    counts = np.zeros(piece.n_documents, np.int64)
                    ordered.add(number, room[: _encode(workspace, room, counts)])
                    with adding:
                        n_ids[piece.first_document : piece.first_document + piece.n_documents] += counts

        n_threads = min(threads, len(pieces))
        with ThreadPoolExecutor(n_threads) as pool:
            for done in [pool.submit(serve) for _ in range(n_threads)]:
                done.result()
        return ordered.length

    @property
    def _find_split(self) -> FindSplit | None:
        if self._characters is not None:
            return partial(find_piece_end, self._characters.cuts)
        return find_split_before if self._pattern in SPLITTABLE_PATTERNS else None

    @contextmanager
    def _workspace(self) -> Iterator["_EncodingWorkspace"]:
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = _EncodingWorkspace(self._vocabulary, self._pattern, self._cache_bytes, self._unicode_version)
        try:
            yield workspace
        finally:
            workspace.release()
            self._idle.append(workspace)


class _Vocabulary:
    """The merges as lookup tables."""

    def __init__(self, merges: Sequence[tuple[int, int]], characters: CharacterVocabulary | None = None) -> None:
        self.characters = characters
        if characters is None:
            self.size = 256 + len(merges)
            array = np.column_stack([np.array(merges, np.int64).reshape(-1, 2), np.arange(256, self.size)])
        else:
            self.size, array = len(characters.ids), characters.merges
        # Three of the eight slots of a bucket are taken on average.
        bits = max(1, (len(array) // 4).bit_length())
        self.shift = 64 - bits
        self.byte_pairs = np.full(2**16, NEVER, np.uint32)
        self.pairs = aligned_zeros((2**bits, 8))
        byte_pairs, pairs = self.byte_pairs.ctypes.data, self.pairs.ctypes.data
        multiplier = fields.MULTIPLIER
        fill_pairs(array.ctypes.data, len(array), byte_pairs, pairs, len(self.pairs), multiplier, self.shift)

    def give_to(self, workspace: Workspace) -> None:
        if self.characters is not None:
            workspace.state[fields.SCANNER] = scan_pieces.address
            workspace.point(fields.CLASSES, self.characters.cuts)
            workspace.point(fields.SYMBOLS, self.characters.symbols)
        workspace.point(fields.BYTE_PAIRS, self.byte_pairs)
        workspace.point(fields.PAIRS, self.pairs, fields.N_BUCKETS)
        workspace.state[fields.PAIRS_SHIFT] = self.shift
        workspace.state[fields.VOCABULARY] = self.size
        workspace.point(fields.SHORT_IDS, np.full(LANES * SHORT_ROOM, NO_ID, np.uint32))
        workspace.point(fields.SHORT_RANKS, np.zeros(LANES * SHORT_ROOM, np.uint32))
        workspace.point(fields.SHORT_LANES, np.zeros((LANES, 3), np.int64))
        workspace.point(fields.RANKS, np.full((self.size, 2), NEVER, np.uint32))
        workspace.point(fields.RANK_BITS, np.zeros(self.size // 64 + 1, np.uint64))


class _EncodingWorkspace(Workspace):
    """A workspace with a vocabulary and buffers for ids."""

    def __init__(self, vocabulary: _Vocabulary, pattern: str, cache_bytes: int, unicode_version: str) -> None:
        super().__init__(pattern, cache_bytes, unicode_version)
        vocabulary.give_to(self)
        self.point(fields.IDS, np.empty(_SCRATCH_IDS, np.uint32), fields.IDS_ROOM)
        self.point(fields.PLACES, np.empty((255, 6), np.uint32), fields.LONG_ROOM)
        functions = map(python_function, _PYTHON_FUNCTIONS)
        self.encode_short = encode_short.builtin(self.address, encode_documents.address, *functions)


class _OrderedOutput:
    """The ids of numbered pieces, written to `ids` in the order of the pieces, whichever thread finishes first.

    Ids of a piece whose turn has come are written to `ids` at once, only those of later ones are kept until then. So
    little memory is touched besides `ids`: a page fault costs as much time as encoding a few hundred bytes.
    """

    def __init__(self, ids: NDArray) -> None:
        self._ids = ids
        self.length = 0
        self._turn = 0
        self._waiting: dict[int, NDArray] = {}
        self._lock = threading.Lock()

    def add(self, number: int, ids: NDArray) -> None:
        """Add all ids of piece `number`; they are copied."""
        with self._lock:
            if number != self._turn:
                self._waiting[number] = ids.copy()
                return
            self._append(ids)
            while (waiting := self._waiting.pop(self._turn, None)) is not None:
                self._append(waiting)

    def _append(self, ids: NDArray) -> None:
        self._ids[self.length : self.length + len(ids)] = ids
        self.length += len(ids)
        self._turn += 1


def _encode(workspace: Workspace, ids: NDArray, n_ids: NDArray[np.int64]) -> int:
    """Encode the workspace's text into `ids`, which has room for an id per byte; returns how many there are, and adds
    them to `n_ids` for each document."""
    state = workspace.state
    workspace.point(fields.N_IDS_BY_DOCUMENT, n_ids)
    workspace.point(fields.OUT, ids)
    state[fields.OUT_BYTES], state[fields.N_OUT] = ids.itemsize, 0
    while (status := encode_into(workspace.address, encode_documents.address)) != fields.DONE:
        if status == fields.NEEDS_TABLE:
            workspace.make_room(may_clear=True)
        elif status == fields.NEEDS_LONG_ROOM:
            workspace.point(fields.PLACES, np.empty((state[fields.NEEDED_BYTES], 6), np.uint32), fields.LONG_ROOM)
        else:
            room = state[fields.NEEDED_BYTES] + IDS_MARGIN
            workspace.point(fields.IDS, np.empty(room, np.uint32), fields.IDS_ROOM)
    return int(state[fields.N_OUT])
