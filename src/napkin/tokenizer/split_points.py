"""Where a text may be split so that its parts, pre-tokenized one by one, give the pre-tokens of the whole.

Whatever the surrounding text, all named patterns except `whole` end a pre-token at two places: between an ASCII letter
and a space that is followed by an ASCII letter; and before an ASCII letter that follows a line feed which follows a
printable ASCII character other than the space. Text without these, in other scripts or of numbers, has more of them,
which take longer to find: between any character that is not white space and a space; between a letter or a digit and a
line end; after a line feed that follows a printable character and precedes one other than the slash, which o200k joins
to symbols before it; and between a letter and Chinese or Japanese punctuation.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SPLIT = re.compile(rb"(?<=[A-Za-z])(?= [A-Za-z])|(?<=[!-~]\n)(?=[A-Za-z])")
# Letters whose every neighbour in the range is one too, and has been since Unicode 5: Cyrillic, Arabic, kana, Chinese.
_LETTER = rb"(?:(?<=[A-Za-z])|(?<=[\xd0-\xd1][\x80-\xbf])|(?<=\xd8[\xa1-\xba])|(?<=\xe3\x81[\x81-\xbf])"
_LETTER += rb"|(?<=\xe3\x83[\x80-\xba])|(?<=[\xe5-\xe8][\x80-\xbf][\x80-\xbf]))"
_AFTER_NO_WHITE_SPACE = rb"(?<=[!-~\x80-\xbf])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
_AFTER_NO_WHITE_SPACE += rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)"
_ANY_SPLIT = re.compile(
    _AFTER_NO_WHITE_SPACE
    + rb"(?= )|(?:"
    + _LETTER
    + rb"|(?<=[0-9]))(?=[\r\n])|(?<=[!-~]\n)(?=[!-.0-~])|"
    # The ideographic comma and full stop; the full-width exclamation mark, comma, colon, semicolon and question mark.
    + _LETTER
    + rb"(?=\xe3\x80[\x81\x82]|\xef\xbc[\x81\x8c\x9a\x9b\x9f])"
)
SPLITTABLE_PATTERNS = frozenset({"gpt2", "gpt4", "cl100k", "o200k", "qwen2"})
"""The patterns for which that is true."""

_WINDOW_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Piece:
    """Text from `start` on with whole documents, or with a part of one; they end at `document_ends`."""

    start: int
    document_ends: "NDArray[np.int64]"
    first_document: int

    @property
    def stop(self) -> int:
        """Where the piece ends."""
        return int(self.document_ends[-1])

    @property
    def n_documents(self) -> int:
        """The number of documents of which it contains at least a part."""
        return len(self.document_ends)


def split_into_pieces(
    text: bytes, document_ends: "NDArray[np.int64]", size: int, *, split_documents: bool = True
) -> list[Piece]:
    """Divide documents that follow one another into pieces of about `size` bytes, which may split long documents."""
    return list(_pieces(text, document_ends, max(size, 1), split_documents))


def find_split(text: bytes | memoryview, start: int) -> int | None:
    """The first offset from `start` on where the text may be split; None if there is none within 64 KiB."""
    # The lookbehinds also see the bytes before the start of the search.
    match = _SPLIT.search(text, start, start + _WINDOW_BYTES)
    return match.start() if match else None


def find_any_split(text: bytes | memoryview, start: int) -> int | None:
    """Like `find_split`, where there is none: also offsets in other scripts, and in numbers and symbols."""
    match = _ANY_SPLIT.search(text, start, start + _WINDOW_BYTES)
    return match.start() if match else None


def _pieces(text: bytes, document_ends: "NDArray[np.int64]", size: int, may_split: bool) -> Iterator[Piece]:
    import numpy as np

    start, first, n_documents = 0, 0, len(document_ends)
    while first < n_documents:
        # The documents that end within the size, or else a part of the one that does not.
        last = int(np.searchsorted(document_ends, start + size, side="right"))
        if last > first:
            yield Piece(start, document_ends[first:last], first)
            start, first = int(document_ends[last - 1]), last
            continue
        stop = int(document_ends[first])
        end = _part_end(text, start, stop, size) if may_split else stop
        yield Piece(start, np.array([end], np.int64), first)
        start = end
        if end == stop:
            first += 1


def _part_end(text: bytes, start: int, stop: int, size: int) -> int:
    # If there is no split point, as in scripts without spaces, the search continues a whole size further on.
    for position in range(start + size, stop, max(size, _WINDOW_BYTES)):
        split = find_split(text, position)
        if split is None:
            split = find_any_split(text, position)
        if split is not None and split < stop:
            return split
    return stop
