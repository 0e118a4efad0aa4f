"""Character vocabularies for the compiled core: the tables that an `Encoder` needs.

Symbols are numbered so that texts in ASCII begin as they do with a vocabulary on bytes: symbols 0 to 127 are the ASCII
characters, 128 to 255 the bytes of characters that the vocabulary lacks, then come its other characters, then the
tokens that merges make, in the order of their ranks. Several pairs may make one token. Only one of them is ever found
side by side, since the merges within a token do not depend on the text around it (see interchange/assembly.py); so the
pairs of a token may share one rank, which is its symbol.

A merge joins a token that ends in one character and a token that begins with another. Between two characters for which
there is no such merge, no token reaches across: there a text is cut into pieces, which are encoded alone and kept as
pre-tokens are. In English text these are words with the space before them, and punctuation.

The plain twins are `merge_symbols_of` and `_pieces` of character_bpe.py, whose pieces are larger.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import load_u8, load_u32, load_u64, store_i64, store_u32
from napkin.tokenizer.numba.dispatch import MAX_VOCAB_SIZE

_N_BYTES = 256
_N_CODE_POINTS = 0x110000
_ASCII = 128
# Behind a table of 128 x 128 bytes for pairs in ASCII: the shift, then a bit for each value of the hash of a pair.
_ASCII_PAIRS = _ASCII * _ASCII
_SHIFT_AT = _ASCII_PAIRS
_BITS_AT = _ASCII_PAIRS + 8
_LEAST_BITS, _MOST_BITS = 12, 24
_BITS_PER_PAIR = 16
_MULTIPLIER = 0x9E3779B97F4A7C15
_NO_SYMBOL = 0
_UNKNOWN = -1
_MOST_STEPS = 2**22


@dataclass(frozen=True)
class CharacterVocabulary:
    """The symbols of a vocabulary on characters, and where texts are cut."""

    characters: str
    """The characters beyond ASCII that have a symbol, from 256 on."""
    merges: NDArray[np.int64]
    """The two symbols that are merged, and the one that they become: of shape [n_merges, 3]."""
    ids: NDArray[np.int64]
    """The vocabulary's id of each symbol."""
    joined: Collection[tuple[int, int]]
    """The code points between which a merge may reach, as last and next."""

    @cached_property
    def symbols(self) -> NDArray[np.uint32]:
        """The symbol of each code point, 0 where it has none; a page that is never looked up takes no memory."""
        found = np.zeros(_N_CODE_POINTS, np.uint32)
        found[list(map(ord, self.characters))] = range(_N_BYTES, _N_BYTES + len(self.characters))
        return found

    @cached_property
    def cuts(self) -> NDArray[np.uint8]:
        """The table by which `scan_pieces` cuts. Pairs beyond ASCII share bits: then there is a cut less."""
        pairs = np.array(sorted(self.joined), np.int64).reshape(-1, 2)
        in_ascii = (pairs < _ASCII).all(axis=1)
        wanted = int((~in_ascii).sum()) * _BITS_PER_PAIR
        n_bits = min(max(wanted.bit_length(), _LEAST_BITS), _MOST_BITS)
        table = np.zeros(_BITS_AT + 2**n_bits // 8, np.uint8)
        table[pairs[in_ascii] @ [_ASCII, 1]] = 1
        table[_SHIFT_AT:_BITS_AT].view(np.int64)[0] = 64 - n_bits
        others = pairs[~in_ascii].astype(np.uint64)
        keys = (others[:, 0] << np.uint64(21) | others[:, 1]) * np.uint64(_MULTIPLIER) >> np.uint64(64 - n_bits)
        bits = (np.uint64(1) << (keys & np.uint64(7))).astype(np.uint8)
        np.bitwise_or.at(table, _BITS_AT + (keys >> np.uint64(3)).astype(np.int64), bits)
        return table


def character_vocabulary(
    tokens: Sequence[str],
    ids_by_text: Mapping[str, int],
    byte_ids: Sequence[int],
    ranks: Mapping[tuple[int, int], int],
    made: Sequence[int],
    *,
    splits_spaces: bool,
) -> CharacterVocabulary | None:
    """The vocabulary of a CharacterBPETokenizer; None where the compiled core cannot give its ids.

    `tokens[id]` is a text, `ids_by_text` has those of ordinary tokens, the pair of rank r becomes `made[r]`. The core
    does without merges of the bytes of a character that has no token, and has room for a million symbols.
    """
    ascii_ids = [ids_by_text.get(chr(byte), byte_ids[byte]) for byte in range(_ASCII)]
    missing = set(byte_ids).difference(map(ids_by_text.get, map(chr, range(_ASCII))))
    if any(first in missing or second in missing for first, second in ranks):
        return None
    characters = "".join(sorted(text for text in ids_by_text if len(text) == 1 and ord(text) >= _ASCII))
    in_order = _made_in_order(tokens, ids_by_text, ranks, made)
    if in_order is None or _N_BYTES + len(characters) + len(in_order) > MAX_VOCAB_SIZE:
        return None
    ids = [*ascii_ids, *byte_ids[_ASCII:], *(ids_by_text[character] for character in characters), *in_order]
    symbol_of = np.full(len(tokens), _UNKNOWN, np.int64)
    symbol_of[ids] = range(len(ids))
    pairs = np.array(list(ranks), np.int64).reshape(-1, 2)
    merges = symbol_of[np.column_stack([pairs, np.array(made, np.int64)])]
    # A part that neither is a character nor is made by a merge occurs in no text.
    merges = np.ascontiguousarray(merges[(merges != _UNKNOWN).all(axis=1)])
    joined = {(ord(tokens[first][-1]), ord(tokens[second][0])) for first, second in ranks}
    if splits_spaces:
        joined = {pair for pair in joined if pair[1] != ord(" ")}
    return CharacterVocabulary(characters, merges, np.array(ids, np.int64), joined)


def _made_in_order(
    tokens: Sequence[str], ids_by_text: Mapping[str, int], ranks: Mapping[tuple[int, int], int], made: Sequence[int]
) -> list[int] | None:
    """The tokens that merges make, by the rank of the one pair that makes it in texts; None if that takes too long."""
    first = dict(zip(reversed(made), range(len(made) - 1, -1, -1), strict=True))
    again = {token for rank, token in enumerate(made) if rank and made[rank - 1] != token and first[token] != rank}
    # Pairs of one token that follow one another may share a rank, whichever of them it is.
    if sum(len(tokens[token]) ** 2 for token in again) > _MOST_STEPS:
        return None
    for token in again:
        symbols = [ids_by_text.get(character, _UNKNOWN) for character in tokens[token]]
        first[token] = _last_rank(symbols, ranks, made, first[token])
    return sorted(first, key=first.__getitem__)


def _last_rank(symbols: list[int], ranks: Mapping[tuple[int, int], int], made: Sequence[int], default: int) -> int:
    """The rank of the last merge that makes a token of its symbols; the default if none does."""
    last = never = len(made)
    while len(symbols) > 1:
        found = [ranks.get(pair, never) for pair in pairwise(symbols)]
        if (last := min(found)) == never:
            return default
        i = found.index(last)
        symbols[i : i + 2] = [made[last]]
    return last


@CompiledFunction
def scan_pieces(text, start, stop, limit, classes, ends, room):
    """The scanner (see scanners.py) of a vocabulary on characters; `classes` is the address of its `cuts`."""
    count = 0
    before, width = _character(text, start, stop)
    i = start + width
    while i < stop and count < room:
        code, width = _character(text, i, stop)
        # Written before it is known to be one: a branch here would be unpredictable.
        store_i64(ends + 8 * count, i)
        count += 1 - _is_joined(classes, before, code)
        before = code
        i += width
    if i >= stop:
        store_i64(ends + 8 * count, stop)
        count += 1
    return count


def find_piece_end(cuts: NDArray[np.uint8], text: bytes, start: int, stop: int) -> int | None:
    """The first place after `start` and before `stop` at which `scan_pieces` cuts a text; None if there is none."""
    found = first_cut(np.frombuffer(text, np.uint8).ctypes.data, start, stop, cuts.ctypes.data)
    return found if found < stop else None


@CompiledFunction
def first_cut(text, start, stop, cuts):
    """The plain twin is the first piece of `scan_pieces`."""
    # Within a character the search begins with the next one.
    while start < stop and load_u8(text + start) & 0xC0 == 0x80:
        start += 1
    if start >= stop:
        return stop
    before, width = _character(text, start, stop)
    i = start + width
    while i < stop:
        code, width = _character(text, i, stop)
        if not _is_joined(cuts, before, code):
            break
        before = code
        i += width
    return i


@jitted
def _is_joined(cuts, before, code):
    """1 if a merge may reach across the place between two characters, else 0."""
    if before < _ASCII and code < _ASCII:
        return load_u8(cuts + (before * _ASCII + code))
    key = (np.uint64(before) << _21 | np.uint64(code)) * np.uint64(_MULTIPLIER)
    bit = np.int64(key >> load_u64(cuts + _SHIFT_AT))
    return load_u8(cuts + _BITS_AT + (bit >> 3)) >> (bit & 7) & 1


_21 = np.uint64(21)


@jitted
def write_symbols(symbols, text, n_bytes, out, stride):
    """Write the symbols of a text as uint32, `stride` bytes apart; returns how many there are."""
    count, i = 0, 0
    while i < n_bytes:
        code, width = _character(text, i, n_bytes)
        symbol = code if code < _ASCII else load_u32(symbols + 4 * code)
        if symbol == _NO_SYMBOL and code:
            for k in range(i, i + width):
                store_u32(out, load_u8(text + k))
                out += stride
            count += width
        else:
            store_u32(out, symbol)
            out += stride
            count += 1
        i += width
    return count


@jitted
def _character(text, i, stop):
    """The code point of the character at `i`, which must be before `stop`, and its length in bytes; for a byte that is
    not UTF-8, U+FFFF and 1."""
    byte = load_u8(text + i)
    if byte < 0x80:
        return byte, 1
    if byte < 0xE0:
        if i + 1 < stop:
            return (byte & 0x1F) << 6 | _low_bits(text, i + 1), 2
    elif byte < 0xF0:
        if i + 2 < stop:
            return (byte & 0x0F) << 12 | _low_bits(text, i + 1) << 6 | _low_bits(text, i + 2), 3
    elif i + 3 < stop:
        code = (byte & 7) << 18 | _low_bits(text, i + 1) << 12 | _low_bits(text, i + 2) << 6 | _low_bits(text, i + 3)
        if code < _N_CODE_POINTS:
            return code, 4
    return 0xFFFF, 1


@jitted
def _low_bits(text, i):
    return load_u8(text + i) & 0x3F
