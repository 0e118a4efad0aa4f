"""Repeated passages: the file of a shard's text and anchors, and the search for bytes that the corpus has before.

    the texts of the records as UTF-8, one after another, and up to 7 zero bytes
    int64: where each record's text ends
    uint64: the keys of the anchors; int64: twice their places in the text, and 1 where a choice was tied
    int64: format, shortest passage, records, bytes of text, anchors

Anchors are such that two equal passages of the shortest length or more have an equal anchor at the same place in them:
of the windows of half that length in the passage, the one with the smallest hash; where several have it the choice is
tied, and the places may differ.

Removal of exact substrings is that of Lee et al. (2022). A window of N bytes at a place is repeated if the same N bytes
begin at an earlier place, at least N bytes before, in the order of the files. The bytes of all repeated windows are
found, so every repetition of N bytes or more is found whole, and the first occurrence stays. Windows do not reach from
one record into the next.

Instead of a suffix array (8 bytes or more of memory per byte of text), anchors of N / 2 bytes are compared: equal
windows have equal ones. The text around each repeated anchor is compared with that around the first of its key, which
settles most windows: those that are equal are repeated. Of the anchors of a key that have others, several may have
equal ones: windows with these, and with tied anchors, are looked up in a table by their hashes. The table has the first
place of each window, 8 bytes, and is made in parts of the hashes where it does not fit. Windows of equal hash are
compared byte by byte; from one that is repeated, the next bytes are compared with those that follow its first place,
which needs no table. A mark takes one bit per byte of text.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.compiled import DEDUPLICATION, address_of
from napkin.curation.deduplication.equal_keys import Marks, Numbers, equal_pairs, sorts_at_once
from napkin.curation.deduplication.shard_files import Keys
from napkin.errors import NapkinError
from napkin.files import atomic_file, refuse_irregular

_FORMAT = 0x32656761_73736170
_FOOTER = 5
_PIECE = 2**22


def anchor_width(shortest: int) -> int:
    """The bytes of an anchor."""
    return shortest // 2


def write_passages(path: Path, texts: Iterable[str], shortest: int) -> None:
    """Write a new file; beside one text, the anchors of all are in memory: about 64 / shortest bytes per byte of text,
    more where short pieces are repeated."""
    ends: list[int] = []
    keys: list[NDArray[np.uint64]] = []
    places: list[NDArray[np.int64]] = []
    size = 0
    with atomic_file(path) as file:
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            file.write(data)
            found, where = anchors_of(data, shortest)
            keys += found
            places += [each + 2 * size for each in where]
            size += len(data)
            ends.append(size)
        file.write(bytes(-size % 8))
        n_anchors = sum(map(len, keys))
        footer = np.array([_FORMAT, shortest, len(ends), size, n_anchors], np.int64)
        for array in (np.array(ends, np.int64), *keys, *places, footer):
            file.write(array.data)


def anchors_of(data: bytes, shortest: int) -> tuple[list[NDArray[np.uint64]], list[NDArray[np.int64]]]:
    """The keys and places of the anchors of a text, as a file has them, in pieces; it has none if it is shorter than
    `shortest`."""
    DEDUPLICATION.load("windows")
    from napkin.curation.deduplication.compiled.windows import find_anchors

    width = anchor_width(shortest)
    among = shortest - width + 1
    text, ring = np.frombuffer(data, np.uint8), np.empty(among, np.uint64)
    all_keys: list[NDArray[np.uint64]] = []
    all_places: list[NDArray[np.int64]] = []
    # Pieces overlap, so that each passage of the shortest length is in one.
    for start in range(0, len(data) - shortest + 1, _PIECE):
        n = min(_PIECE + shortest - 1, len(data) - start)
        keys, places = np.empty(n - width + 1, np.uint64), np.empty(n - width + 1, np.int64)
        addresses = [address_of(each) for each in (ring, keys, places)]
        found = find_anchors(address_of(text) + start, n, width, among, *addresses)
        all_keys.append(keys[:found].copy())
        all_places.append(places[:found] + 2 * start)
    return all_keys, all_places


class PassageFile:
    """A file of passages, mapped into memory. Raises NapkinError if it is not one, or was made for another length."""

    def __init__(self, path: Path, shortest: int) -> None:
        refuse_irregular(path)
        size = path.stat().st_size
        if size < 8 * _FOOTER or size % 8:
            raise NapkinError(f"'{path}' was cut off: make it again")
        file = np.asarray(np.memmap(path, np.uint8, "r"))
        form, of_length, records, n_bytes, anchors = file[-8 * _FOOTER :].view(np.int64).tolist()
        text_end = -(-n_bytes // 8) * 8
        if form != _FORMAT or min(records, n_bytes, anchors) < 0:
            raise NapkinError(f"'{path}' is not a file of passages: make it again")
        if size != text_end + 8 * (records + 2 * anchors + _FOOTER):
            raise NapkinError(f"'{path}' was cut off: make it again")
        if of_length != shortest:
            raise NapkinError(f"'{path}' was made for passages of {of_length} bytes, not {shortest}: make it again")
        numbers = file[text_end : size - 8 * _FOOTER]
        self.text: NDArray[np.uint8] = file[:n_bytes]
        self.ends = numbers[: 8 * records].view(np.int64)
        self.anchor_keys = numbers[8 * records :][: 8 * anchors].view(np.uint64)
        self.anchor_places = numbers[8 * (records + anchors) :].view(np.int64)
        # Records follow each other to the end of the text, and all anchors are in it.
        places = self.anchor_places
        in_order = bool((np.diff(self.ends, prepend=0) >= 0).all())
        whole = (int(self.ends[-1]) if records else 0) == n_bytes
        if not (in_order and whole and (not len(places) or 0 <= int(places.min()) <= int(places.max()) < 2 * n_bytes)):
            raise NapkinError(f"'{path}' is damaged: make it again")


_STEP = 2**16
_FULLEST = 0.7
"""The largest fraction of the table that is used, so that a search looks at few slots."""

Span = tuple[int, int]


class RepeatedPassages:
    """The repeated windows of `shortest` bytes in files, found in at most `memory` bytes and a folder for the rest."""

    def __init__(self, files: Sequence[PassageFile], shortest: int, scratch: Path, memory: int) -> None:
        DEDUPLICATION.load("windows")
        self._files = files
        self._shortest = shortest
        self._starts = np.cumsum([0, *(len(file.text) for file in files)])
        self._marks = Marks(int(self._starts[-1]), scratch / "repeated", memory // 4)
        n_anchors = sum(len(file.anchor_keys) for file in files)
        addresses = [
            (address_of(each.text), address_of(each.ends), len(each.ends), address_of(each.anchor_places))
            for each in files
        ]
        self._addresses = np.array(addresses, np.int64).reshape(-1, 4)
        anchors = Marks(n_anchors, scratch / "anchors", memory // 8)
        in_one = sorts_at_once(n_anchors, 1, memory // 2)
        for firsts, others in equal_pairs(self._anchors(), n_anchors, 1, scratch, memory // 2):
            self._compare(firsts, others, anchors, in_one=in_one)
        self._mark_repeated(anchors, memory // 2)

    def of_records(self, number: int) -> Iterator[tuple[int, list[Span]]]:
        """(record, spans of its bytes) for the records of a file that have repeated windows.

        Spans are (first byte, byte after the last), in order and apart from each other.
        """
        file, begin = self._files[number], 0
        offset = int(self._starts[number])
        for record, end in enumerate(file.ends.tolist()):
            if end - begin >= self._shortest and (found := self._spans(offset + begin, offset + end)):
                yield record, found
            begin = end

    def _anchors(self) -> Iterator[tuple[Keys, Numbers]]:
        start = 0
        for file in self._files:
            for first in range(0, len(file.anchor_keys), _STEP):
                keys = file.anchor_keys[first : first + _STEP]
                yield keys[:, None], np.arange(start, start + len(keys))
                start += len(keys)

    def _compare(self, firsts: Numbers, others: Numbers, anchors: Marks, *, in_one: bool) -> None:
        """Mark what is repeated around pairs of anchors, sorted by their keys, and in `anchors` those that are left.

        `in_one` says that all pairs of each key are given at once.
        """
        from napkin.curation.deduplication.compiled import windows

        firsts, others = np.ascontiguousarray(firsts), np.ascontiguousarray(others)
        anchor_starts = np.cumsum([0, *(len(file.anchor_keys) for file in self._files)])
        found = np.empty(len(firsts), np.uint8)
        windows.compare_anchors(
            *(address_of(firsts), address_of(others), len(firsts)),
            *(self._shortest, self._shortest - anchor_width(self._shortest), address_of(anchor_starts)),
            *(address_of(self._starts), address_of(self._addresses), len(self._files)),
            *(self._marks.address, address_of(found)),
        )
        anchors.set(firsts[found & windows.FIRST_TIED != 0])
        anchors.set(others[found & windows.OTHER_TIED != 0])
        is_left = found & windows.COVERED == 0
        firsts, others = firsts[is_left], others[is_left]
        if in_one:
            # An anchor without partners has no equal anchor.
            same = firsts[1:] == firsts[:-1]
            others = (
                others[np.concatenate([same, [False]]) | np.concatenate([[False], same])] if len(others) else others
            )
        anchors.set(others)

    def _regions(self, number: int, anchors: Marks) -> Iterator[Numbers]:
        """Spans of a file in which windows with an anchor that is left begin, [n, 2], in order; they may touch."""
        file = self._files[number]
        start = sum(len(each.anchor_keys) for each in self._files[:number])
        reach = self._shortest - anchor_width(self._shortest)
        done = 0
        for piece in range(0, len(file.anchor_places), _STEP):
            places = file.anchor_places[piece : piece + _STEP]
            places = places[anchors.between(start + piece, start + piece + len(places))] >> 1
            if not len(places):
                continue
            records = np.searchsorted(file.ends, places, side="right")
            begins = np.where(records > 0, file.ends[records - 1], 0)
            lasts = np.maximum.accumulate(np.minimum(places, file.ends[records] - self._shortest) + 1)
            # Windows within reach of an earlier anchor belong to that one.
            firsts = np.maximum(np.maximum(places - reach, begins), np.concatenate([[done], lasts[:-1]]))
            done = max(done, int(lasts[-1]))
            spans = np.stack([firsts, lasts], axis=1)
            yield np.ascontiguousarray(spans[firsts < lasts])

    def _mark_repeated(self, anchors: Marks, memory: int) -> None:
        """Mark where windows begin that are equal to an earlier one that they do not overlap."""
        from napkin.curation.deduplication.compiled.windows import BLOCK, mark_repeated

        count = sum(
            int(np.diff(spans).sum()) for each in range(len(self._files)) for spans in self._regions(each, anchors)
        )
        slots = 1 << (min(memory // 8, max(64, 2 * count))).bit_length() - 1
        parts = -(-count // int(slots * _FULLEST)) if count else 0
        files, keys = self._addresses, np.empty(BLOCK, np.uint64)
        table = np.empty(slots, np.uint64)
        for part in range(parts):
            table[:] = 0
            for number in range(len(self._files)):
                for spans in self._regions(number, anchors):
                    mark_repeated(
                        *(int(files[number, 0]), int(self._starts[number]), address_of(spans), len(spans)),
                        *(self._shortest, address_of(self._starts), address_of(files), len(files)),
                        *(address_of(table), slots - 1, part, parts, address_of(keys), self._marks.address),
                    )

    def _spans(self, begin: int, end: int) -> list[Span]:
        """The repeated bytes of a record, counted from its begin."""
        starts = np.flatnonzero(self._marks.between(begin, end))
        if not len(starts):
            return []
        ends = starts + self._shortest
        breaks = np.flatnonzero(starts[1:] > ends[:-1])
        return list(zip(starts[[0, *(breaks + 1)]].tolist(), ends[[*breaks, len(ends) - 1]].tolist(), strict=True))


def without_spans(data: bytes, spans: Sequence[Span]) -> bytes:
    """UTF-8 without spans of its bytes; a character that is only partly in a span stays.

    >>> without_spans("aébcd".encode(), [(2, 4)]).decode()
    'aécd'
    """
    parts: list[bytes] = []
    begin = 0
    for first, last in spans:
        while first < last and data[first] & 0xC0 == 0x80:
            first += 1
        while last > first and last < len(data) and data[last] & 0xC0 == 0x80:
            last -= 1
        parts.append(data[begin:first])
        begin = last
    return b"".join([*parts, data[begin:]])
