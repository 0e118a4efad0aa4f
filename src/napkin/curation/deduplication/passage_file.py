"""What the removal of repeated passages has to know of a shard: its text, and anchors in it, in a file.

    the texts of the records as UTF-8, one after another, and up to 7 zero bytes
    int64: where each record's text ends
    uint64: the keys of the anchors; int64: their places in the text
    int64: format, shortest passage, records, bytes of text, anchors

Anchors are such that two equal passages of the shortest length or more have an equal anchor at the same place in them:
of the windows of half that length in the passage, the one with the smallest hash.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from napkin.curation.deduplication.compiled.loading import DEDUPLICATION, address_of
from napkin.errors import NapkinError
from napkin.files import atomic_file, refuse_irregular

_FORMAT = 0x31656761_73736170
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
            places += [each + size for each in where]
            size += len(data)
            ends.append(size)
        file.write(bytes(-size % 8))
        n_anchors = sum(map(len, keys))
        footer = np.array([_FORMAT, shortest, len(ends), size, n_anchors], np.int64)
        for array in (np.array(ends, np.int64), *keys, *places, footer):
            file.write(array.data)


def anchors_of(data: bytes, shortest: int) -> tuple[list[NDArray[np.uint64]], list[NDArray[np.int64]]]:
    """The keys and places of the anchors of a text, in pieces; it has none if it is shorter than `shortest`."""
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
        all_places.append(places[:found] + start)
    return all_keys, all_places


class PassageFile:
    """Such a file, mapped into memory. Raises NapkinError if it is none, or made for another length."""

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
        if not self._is_sound():
            raise NapkinError(f"'{path}' is damaged: make it again")

    def _is_sound(self) -> bool:
        """Whether records follow each other to the end of the text, and anchors are in it."""
        places, n_bytes = self.anchor_places, len(self.text)
        in_order = bool((np.diff(self.ends, prepend=0) >= 0).all())
        whole = (int(self.ends[-1]) if len(self.ends) else 0) == n_bytes
        return in_order and whole and (not len(places) or 0 <= int(places.min()) <= int(places.max()) < n_bytes)
