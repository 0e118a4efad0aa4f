"""Rolling hashes of windows of bytes, compiled.

The hash of a window is a polynomial of its bytes modulo 2^64, mixed. It is not safe against texts made to collide, so
whoever removes text by it compares the bytes; `same_bytes` does.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import i64_at, load_u64, u8_at, u64_at

_32, _29 = np.uint64(32), np.uint64(29)
_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)


@jitted
def mixed(x):
    """A bijection of 64 bits after which each bit depends on all: MurmurHash3's constants, with other shifts."""
    x = (x ^ (x >> _32)) * _FIRST
    x = (x ^ (x >> _29)) * _SECOND
    return x ^ (x >> _32)


_BASE = np.uint64(0xD6E8FEB86659FD93)
_ZERO, _ONE = np.uint64(0), np.uint64(1)


@CompiledFunction
def find_anchors(text, n, width, among, ring, keys, places):
    """Write the window with the smallest hash of each `among` consecutive ones, and return how many were written.

    Winnowing (Schleimer, Wilkerson and Aiken 2003), the robust form: of equal hashes the one that was chosen before
    stays while it is among them, else it is the last. `keys` and `places` have room for n - width + 1 each, `ring` for
    `among` uint64.
    """
    ring_, keys_, places_ = u64_at(ring), u64_at(keys), i64_at(places)
    bytes_ = u8_at(text)
    found, best, best_key = 0, -1, _ZERO
    leaving = _power(width)
    rolling = _ZERO
    for i in range(n):
        rolling = rolling * _BASE + np.uint64(bytes_[i]) + _ONE
        if i >= width:
            rolling -= leaving * (np.uint64(bytes_[i - width]) + _ONE)
        start = i - width + 1
        if start < 0:
            continue
        key = mixed(rolling)
        ring_[start % among] = key
        if start < among - 1:
            continue
        first = start - among + 1
        if best < first:
            # The one that was chosen is gone, or there was none.
            best, best_key = first, ring_[first % among]
            for other in range(first + 1, start + 1):
                if ring_[other % among] <= best_key:
                    best, best_key = other, ring_[other % among]
        elif key < best_key:
            best, best_key = start, key
        else:
            continue
        keys_[found], places_[found] = best_key, best
        found += 1
    return found


@CompiledFunction
def hash_windows(text, first, last, width, keys):
    """keys[i] = the hash of the `width` bytes from first + i on, for each start from `first` to before `last`."""
    bytes_, keys_ = u8_at(text), u64_at(keys)
    leaving = _power(width)
    rolling = _ZERO
    for i in range(first, first + width):
        rolling = rolling * _BASE + np.uint64(bytes_[i]) + _ONE
    keys_[0] = mixed(rolling)
    for start in range(first + 1, last):
        rolling = rolling * _BASE + np.uint64(bytes_[start + width - 1]) + _ONE
        rolling -= leaving * (np.uint64(bytes_[start - 1]) + _ONE)
        keys_[start - first] = mixed(rolling)


@CompiledFunction
def same_bytes(first, second, n_pairs, width, equal):
    """equal[i] = whether the `width` bytes at the addresses first[i] and second[i] are the same."""
    first_, second_, equal_ = i64_at(first), i64_at(second), u8_at(equal)
    for i in range(n_pairs):
        a, b = first_[i], second_[i]
        place = 0
        while place + 8 <= width and load_u64(a + place) == load_u64(b + place):
            place += 8
        while place < width and u8_at(a)[place] == u8_at(b)[place]:
            place += 1
        equal_[i] = place == width


@jitted
def _power(n):
    power = _ONE
    for _ in range(n):
        power *= _BASE
    return power
