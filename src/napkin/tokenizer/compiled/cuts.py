"""Where a text may be cut so that its parts, scanned one by one, give the pre-tokens of the whole.

The compiled patterns, but for `whole`, end a pre-token between a letter and a blank that a letter follows, and between
a line feed that alone follows a sign and a letter: whatever stands before and after.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CUT = re.compile(rb"(?<=[A-Za-z])(?= [A-Za-z])|(?<=[!-~]\n)(?=[A-Za-z])")
# Patterns for which that holds.
CUTTABLE_PATTERNS = frozenset({"gpt2", "gpt4", "cl100k", "o200k"})
# How far to look for a place to cut before giving up.
_WINDOW_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Piece:
    """Text from `start` on that holds documents, or parts of them, that end at `document_ends`."""

    start: int
    document_ends: "NDArray[np.int64]"
    first_document: int

    @property
    def stop(self) -> int:
        """Where the text ends."""
        return int(self.document_ends[-1])

    @property
    def n_documents(self) -> int:
        """How many documents it holds or holds a part of."""
        return len(self.document_ends)


def pieces_of(text: bytes, document_ends: "NDArray[np.int64]", size: int, *, cut: bool = True) -> list[Piece]:
    """Divide documents that lie one after the other into pieces of about `size` bytes, with `cut` also long ones."""
    return list(_pieces(text, document_ends, max(size, 1), cut))


def find_cut(text: bytes | memoryview, start: int) -> int | None:
    """The first place from `start` on where the text may be cut, within 64 KiB."""
    # A lookbehind sees what is before the position from which is searched.
    match = _CUT.search(text, start, start + _WINDOW_BYTES)
    return match.start() if match else None


def _pieces(text: bytes, document_ends: "NDArray[np.int64]", size: int, may_cut: bool) -> Iterator[Piece]:
    import numpy as np

    start, first, n_documents = 0, 0, len(document_ends)
    while first < n_documents:
        # Documents that end within the size, or else a part of the one that does not.
        last = int(np.searchsorted(document_ends, start + size, side="right"))
        if last > first:
            yield Piece(start, document_ends[first:last], first)
            start, first = int(document_ends[last - 1]), last
            continue
        stop = int(document_ends[first])
        end = _part_end(text, start, stop, size) if may_cut else stop
        yield Piece(start, np.array([end], np.int64), first)
        start = end
        if end == stop:
            first += 1


def _part_end(text: bytes, start: int, stop: int, size: int) -> int:
    # Where there is no place to cut, as in scripts without spaces, the next is looked for a whole size further on.
    for position in range(start + size, stop, max(size, _WINDOW_BYTES)):
        cut = find_cut(text, position)
        if cut is not None and cut < stop:
            return cut
    return stop
