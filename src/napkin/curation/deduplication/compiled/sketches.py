"""Signatures of documents, compiled: one pass over the text, and a few more over the shingles of a short document.

The scheme is fast similarity sketching (Dahlgaard, Knudsen and Thorup 2017). A shingle is hashed once: the hash says
to which of the k positions it belongs, and with what value; a position takes the smallest. While a position is empty,
all shingles are hashed again, so that a position never borrows from another: at most k such rounds, then k in which
all shingles go to one position after another. A position of a later round is not comparable with one of an earlier,
but two documents share the shingle that a position has with probability J, whatever their sizes.
"""

import numpy as np

from napkin.curation.deduplication.compiled.windows import mixed
from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import i64_at, u8_at, u32_at, u64_at

_EMPTY = np.uint32(0xFFFFFFFF)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_WORD_BASE = np.uint64(0xD6E8FEB86659FD93)
_ZERO, _ONE, _TWO, _32 = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_KIND = np.uint32(3)
_FOLD = np.uint32(2)


@CompiledFunction
def sketch_documents(text, ends, n_documents, characters, k, n, signatures, words, ring, shingles, slots, room, closed):
    """Write k uint32 per document, and its number of words.

    `ends` has the int64 offset of each document's end in `text`, which is UTF-8; `characters` the table of
    minhash.py; n is the number of words of a shingle. Buffers: n uint64 in `ring`, `room` (a power of two) uint64 in
    `shingles`, twice as many in `slots`, all zero, and k bytes in `closed`.
    """
    ends_, words_ = i64_at(ends), i64_at(words)
    leaving = _ONE
    for _ in range(n):
        leaving *= _BASE
    start = 0
    for document in range(n_documents):
        signature = u32_at(signatures + 4 * k * document)
        for i in range(k):
            signature[i] = _EMPTY
        n_words, empty, kept = _first_round(
            u8_at(text), start, ends_[document], u32_at(characters), k, n, leaving,
            signature, u64_at(ring), u64_at(shingles), u64_at(slots), room,
        )  # fmt: skip
        if kept > 0 and empty > 0:
            _fill(signature, k, empty, kept, u64_at(shingles), u8_at(closed))
        _clear(kept, u64_at(shingles), u64_at(slots), room)
        words_[document] = n_words
        start = ends_[document]


@jitted
def _first_round(text, start, stop, table, k, n, leaving, signature, ring, shingles, slots, room):
    """The number of words, of empty positions, and of shingles that are remembered for the next rounds."""
    for i in range(n):
        ring[i] = _ZERO
    n_words, empty, kept, slot = 0, k, 0, 0
    rolling, word, inside = _ZERO, _ZERO, False
    position = start
    while position <= stop:
        # Behind the end, as after a separator, the last word ends.
        code, kind = np.uint32(0), np.uint32(0)
        if position < stop:
            code, position = _character(text, position)
            kind, code = table[code] & _KIND, table[code] >> _FOLD
        else:
            position += 1
        if inside and kind != 1:
            rolling, slot = _entered(mixed(word), rolling, leaving, ring, slot, n)
            n_words += 1
            inside = False
            if n_words >= n:
                empty, kept = _take(signature, k, mixed(rolling), empty, kept, shingles, slots, room)
        if kind == 1:
            word = (word if inside else _ZERO) * _WORD_BASE + np.uint64(code) + _ONE
            inside = True
        elif kind == 2:
            # A character that is a word.
            rolling, slot = _entered(mixed(np.uint64(code) + _ONE), rolling, leaving, ring, slot, n)
            n_words += 1
            if n_words >= n:
                empty, kept = _take(signature, k, mixed(rolling), empty, kept, shingles, slots, room)
    if 0 < n_words < n:
        empty, kept = _take(signature, k, mixed(rolling), empty, kept, shingles, slots, room)
    return n_words, empty, kept


@jitted
def _entered(word, rolling, leaving, ring, slot, n):
    """The shingle after a word enters it and the oldest leaves it, and the place in the ring for the next."""
    rolling = rolling * _BASE + word - ring[slot] * leaving
    ring[slot] = word
    return rolling, slot + 1 if slot + 1 < n else 0


@jitted
def _character(text, position):
    """The code point at a position of valid UTF-8, and the position after it."""
    first = np.uint32(text[position])
    if first < 0x80:
        return first, position + 1
    second = np.uint32(text[position + 1]) & np.uint32(63)
    if first < 0xE0:
        return (first & np.uint32(31)) << np.uint32(6) | second, position + 2
    third = np.uint32(text[position + 2]) & np.uint32(63)
    if first < 0xF0:
        return (first & np.uint32(15)) << np.uint32(12) | second << np.uint32(6) | third, position + 3
    fourth = np.uint32(text[position + 3]) & np.uint32(63)
    high = (first & np.uint32(7)) << np.uint32(18) | second << np.uint32(12)
    return high | third << np.uint32(6) | fourth, position + 4


@jitted
def _take(signature, k, shingle, empty, kept, shingles, slots, room):
    """The first round for a shingle; it is remembered, once, while a position is empty."""
    place = np.int64(((shingle >> _32) * np.uint64(k)) >> _32)
    value = np.uint32(shingle & _LOW)
    if value == _EMPTY:
        value -= np.uint32(1)
    if empty > 0 and kept < room:
        kept = _remember(shingle, kept, shingles, slots, room)
    if value < signature[place]:
        if signature[place] == _EMPTY:
            empty -= 1
        signature[place] = value
    return empty, kept


@jitted
def _remember(shingle, kept, shingles, slots, room):
    if shingle == _ZERO:
        shingle = _ONE
    slot = np.int64(shingle) & (2 * room - 1)
    while slots[slot] != _ZERO:
        if slots[slot] == shingle:
            return kept
        slot = (slot + 1) & (2 * room - 1)
    slots[slot] = shingle
    shingles[kept] = shingle
    return kept + 1


@jitted
def _clear(kept, shingles, slots, room):
    if 8 * kept > room:
        for slot in range(2 * room):
            slots[slot] = _ZERO
        return
    for i in range(kept):
        # All slots of a run belong to shingles that are cleared too.
        slot = np.int64(shingles[i]) & (2 * room - 1)
        while slots[slot] != _ZERO:
            slots[slot] = _ZERO
            slot = (slot + 1) & (2 * room - 1)


@jitted
def _fill(signature, k, empty, kept, shingles, closed):
    """Rounds 1 to 2k - 1, until no position is empty; a round changes the positions that were empty before it."""
    for turn in range(1, 2 * k):
        for i in range(k):
            closed[i] = signature[i] != _EMPTY
        step = np.uint64(turn) * _BASE
        for i in range(kept):
            drawn = mixed(shingles[i] + step)
            place = np.int64(((drawn >> _32) * np.uint64(k)) >> _32)
            if turn >= k:
                place = turn - k
            value = np.uint32(drawn & _LOW)
            if value == _EMPTY:
                value -= np.uint32(1)
            if closed[place] == 0 and value < signature[place]:
                if signature[place] == _EMPTY:
                    empty -= 1
                signature[place] = value
        if empty == 0:
            return


@CompiledFunction
def band_keys(signatures, n_documents, k, bands, rows, keys):
    """keys[band, document] = a hash of the band and of its `rows` numbers of the signature."""
    for document in range(n_documents):
        signature = u32_at(signatures + 4 * k * document)
        for band in range(bands):
            key = mixed(np.uint64(band + 1) * _BASE)
            for row in range(rows):
                key = (key ^ np.uint64(signature[band * rows + row])) * _WORD_BASE
                key ^= key >> _32
            u64_at(keys + 8 * n_documents * band)[document] = mixed(key)
