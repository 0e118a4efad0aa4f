"""Rolling hashes of windows of bytes, compiled.

The hash of a window is a polynomial of its bytes modulo 2^64, mixed. It is not safe against texts made to collide, so
the bytes of windows of one hash are compared.
"""

import numpy as np

from napkin.machine_code.compiled_function import CompiledFunction, jitted
from napkin.machine_code.pointers import i64_at, load_u64, prefetch, u8_at, u64_at

_40, _32, _29 = np.uint64(40), np.uint64(32), np.uint64(29)
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

    Winnowing (Schleimer, Wilkerson and Aiken 2003), the robust form: among equal hashes, the one chosen before stays as
    long as it is in the window, otherwise the last one is chosen. `keys` and `places` have room for n - width + 1 each,
    `ring` for `among` uint64. A place is written doubled, plus one where the window had another equal hash.
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
            # The chosen one has left the window, or there was none.
            best, best_key, tied = first, ring_[first % among], 0
            for other in range(first + 1, start + 1):
                if ring_[other % among] <= best_key:
                    tied = 1 if ring_[other % among] == best_key else 0
                    best, best_key = other, ring_[other % among]
        elif key < best_key:
            best, best_key, tied = start, key, 0
        else:
            if key == best_key:
                places_[found - 1] |= 1
            continue
        keys_[found], places_[found] = best_key, 2 * best + tied
        found += 1
    return found


COVERED, FIRST_TIED, OTHER_TIED = 1, 2, 4


@CompiledFunction
def compare_anchors(firsts, others, n, width, reach, anchor_starts, starts, files, n_files, marks, found):
    """Mark the windows around anchors that are equal to those around an earlier anchor, `width` bytes before at least.

    `firsts` and `others` are numbers of anchors with one key each, counted through all files from `anchor_starts`. An
    anchor is in the windows that begin up to `reach` bytes before it. `found` gets a byte per pair: COVERED if all
    windows that the other one is in are marked, and which of the two are tied.
    """
    firsts_, others_, marks_, found_ = i64_at(firsts), i64_at(others), u8_at(marks), u8_at(found)
    for i in range(n):
        first, first_begin, first_end, first_number, first_tied = _anchor(
            firsts_[i], anchor_starts, starts, files, n_files
        )
        other, begin, end, number, tied = _anchor(others_[i], anchor_starts, starts, files, n_files)
        outcome = FIRST_TIED * first_tied | OTHER_TIED * tied
        if number - first_number < width:
            found_[i] = outcome
            continue
        before, behind = min(reach, other - begin), min(width, end - other)
        most = min(before, first - first_begin)
        left = 0
        while left < most and u8_at(first - left - 1)[0] == u8_at(other - left - 1)[0]:
            left += 1
        most = min(behind, first_end - first)
        right = 0
        while right + 8 <= most and load_u64(first + right) == load_u64(other + right):
            right += 8
        while right < most and u8_at(first + right)[0] == u8_at(other + right)[0]:
            right += 1
        for place in range(number - left, number + right - width + 1):
            marks_[place >> 3] |= 1 << (place & 7)
        found_[i] = outcome | (COVERED if left == before and right == behind else 0)


@jitted
def _anchor(number, anchor_starts, starts, files, n_files):
    """The address of an anchor, those of its record and its end, its place in all text, and whether it is tied."""
    starts_, files_ = i64_at(anchor_starts), i64_at(files)
    low = _last_at_most(starts_, n_files, number)
    text, ends, n_records = files_[4 * low], i64_at(files_[4 * low + 1]), files_[4 * low + 2]
    encoded = i64_at(files_[4 * low + 3])[number - starts_[low]]
    place = encoded >> 1
    record = _record_of(ends, n_records, place)
    begin = ends[record - 1] if record else 0
    return text + place, text + begin, text + ends[record], i64_at(starts)[low] + place, encoded & 1


BLOCK = 64
"""Windows whose keys are made together, so that their places in the table are fetched meanwhile."""
TAG_BITS = 24
_TAG = (1 << TAG_BITS) - 1
_MOST_DIFFERENT = 64
"""Windows of one key that are compared, so that texts made to have equal keys do not take long."""


@CompiledFunction
def mark_repeated(
    text, offset, regions, n_regions, width, starts, files, n_files, table, mask, part, parts, keys, marks
):
    """Mark the windows that begin in `regions` and stand earlier, `width` bytes before at least.

    `regions` are pairs (first, after the last) of places in `text`, to which `offset` is added in all text; `files` has
    the address of the text, that of the ends of its records, their number, and the address of the anchors' places, for
    each file, and `starts` where each begins in all text. Windows that are marked before stay out of the table. `table`
    has mask + 1 uint64, zeros at first: a window's first place, counted from one, and a tag of its key. Windows whose
    key is of another `part` are marked only where they go on with what is repeated. `keys` is room for BLOCK uint64,
    `marks` a bit for each byte of all text.
    """
    bytes_, regions_, keys_, marks_ = u8_at(text), i64_at(regions), u64_at(keys), u8_at(marks)
    leaving = _power(width)
    for region in range(n_regions):
        here, last = regions_[2 * region], regions_[2 * region + 1]
        rolling, rolled = _ZERO, -1
        while here < last:
            stop = min(here + BLOCK, last)
            if rolled != here:
                rolling = _ZERO
                for place in range(here, here + width):
                    rolling = rolling * _BASE + np.uint64(bytes_[place]) + _ONE
            for place in range(here, stop):
                key = mixed(rolling)
                keys_[place - here] = key
                prefetch(table + 8 * (np.int64(key) & mask))
                if place + 1 < last:
                    rolling = rolling * _BASE + np.uint64(bytes_[place + width]) + _ONE
                    rolling -= leaving * (np.uint64(bytes_[place]) + _ONE)
            rolled = stop
            place = here
            while place < stop:
                number, key = offset + place, keys_[place - here]
                place += 1
                if parts > 1 and np.int64((key >> _32) * np.uint64(parts) >> _32) != part:
                    continue
                if marks_[number >> 3] >> (number & 7) & 1:
                    continue
                first = _first(key, number, text + place - 1, width, starts, files, n_files, table, mask)
                if first < 0 or number - first < width:
                    continue
                marks_[number >> 3] |= 1 << (number & 7)
                before, end = _place_of(first, starts, files, n_files)
                # The following windows are repeated as long as the next byte equals the byte after the earlier
                # occurrence, within its record.
                while place < last and before + width < end and bytes_[place + width - 1] == u8_at(before + width)[0]:
                    number = offset + place
                    marks_[number >> 3] |= 1 << (number & 7)
                    place += 1
                    before += 1
            here = place


@jitted
def _first(key, number, address, width, starts, files, n_files, table, mask):
    """The first place of the window at `address`; -1 if it is the first, which is written down."""
    table_ = u64_at(table)
    slot, tag = np.int64(key) & mask, np.int64(key >> _40)
    different = 0
    while True:
        entry = np.int64(table_[slot])
        if entry == 0:
            table_[slot] = np.uint64(((number + 1) << TAG_BITS) | tag)
            return -1
        if entry & _TAG == tag:
            first = (entry >> TAG_BITS) - 1
            before, _ = _place_of(first, starts, files, n_files)
            if _same_bytes(before, address, width):
                return first
            different += 1
            if different == _MOST_DIFFERENT:
                return -1
        slot = (slot + 1) & mask


@jitted
def _place_of(number, starts, files, n_files):
    """The address of a place in all text, and that of the end of its record."""
    starts_, files_ = i64_at(starts), i64_at(files)
    low = _last_at_most(starts_, n_files, number)
    text, ends, n_records = files_[4 * low], i64_at(files_[4 * low + 1]), files_[4 * low + 2]
    place = number - starts_[low]
    return text + place, text + ends[_record_of(ends, n_records, place)]


@jitted
def _last_at_most(starts, n, number):
    """The last of `n` ascending starts that is at most `number`."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= number:
            low = middle
        else:
            high = middle
    return low


@jitted
def _record_of(ends, n_records, place):
    """The record that a place is in."""
    low, high = 0, n_records - 1
    while low < high:
        middle = (low + high) // 2
        if ends[middle] <= place:
            low = middle + 1
        else:
            high = middle
    return low


@jitted
def _same_bytes(first, second, width):
    place = 0
    while place + 8 <= width and load_u64(first + place) == load_u64(second + place):
        place += 8
    while place < width and u8_at(first)[place] == u8_at(second)[place]:
        place += 1
    return place == width


@jitted
def _power(n):
    power = _ONE
    for _ in range(n):
        power *= _BASE
    return power
