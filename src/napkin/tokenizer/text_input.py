"""The text that tokenizers accept: its validation, its special tokens, and reading it from files of any size.

Where a text may be split so that its parts, pre-tokenized one by one, give the pre-tokens of the whole.

Whatever the surrounding text, all named patterns except `whole` end a pre-token at two places: between an ASCII letter
and a space that is followed by an ASCII letter; and before an ASCII letter that follows a line feed which follows a
printable ASCII character other than the space. Text without these, in other scripts or of numbers, has more of them,
which take longer to find: between any character that is not white space and a space; between a letter or a digit and a
line end; after a line feed that follows a printable character and precedes one other than the slash, which o200k joins
to symbols before it; and between a letter and Chinese or Japanese punctuation.
"""

import re
from codecs import utf_8_decode
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from napkin.errors import NapkinError
from napkin.files import StrPath, regular

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
_SEARCHED_BYTES = 2**20

FindSplit = Callable[[bytes, int, int], int | None]
"""Called with a text, a start and a stop: the first offset found between them where the text may be split."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text from `start` on with whole documents, or with a part of one; they end at `document_ends`."""

    start: int
    document_ends: "NDArray[np.int64]"
    first_document: int

    @property
    def stop(self) -> int:
        return int(self.document_ends[-1])

    @property
    def n_documents(self) -> int:
        """The number of documents of which it contains at least a part."""
        return len(self.document_ends)


def split_into_pieces(
    text: bytes, document_ends: "NDArray[np.int64]", size: int, find: FindSplit | None
) -> list[Piece]:
    """Divide documents that follow one another into pieces of about `size` bytes; None splits no document."""
    import numpy as np

    pieces: list[Piece] = []
    start, first, n_documents, size = 0, 0, len(document_ends), max(size, 1)
    while first < n_documents:
        # The documents that end within the size, or else a part of the one that does not.
        last = int(np.searchsorted(document_ends, start + size, side="right"))
        if last > first:
            pieces.append(Piece(start, document_ends[first:last], first))
            start, first = int(document_ends[last - 1]), last
            continue
        stop = int(document_ends[first])
        split = find(text, start + size, stop) if find and start + size < stop else None
        end = stop if split is None else split
        pieces.append(Piece(start, np.array([end], np.int64), first))
        start = end
        if end == stop:
            first += 1
    return pieces


def find_split(text: bytes | memoryview, start: int) -> int | None:
    """The first offset from `start` on where the text may be split; None if there is none within 64 KiB."""
    # The lookbehinds also see the bytes before the start of the search.
    match = _SPLIT.search(text, start, start + _WINDOW_BYTES)
    return match.start() if match else None


def find_split_before(text: bytes, start: int, stop: int) -> int | None:
    """The `FindSplit` of `SPLITTABLE_PATTERNS`."""
    # In scripts without spaces there may be none near by: the search goes on, with gaps as large as its windows.
    for position in range(start, stop, _SEARCHED_BYTES):
        split = find_split(text, position)
        if split is None:
            split = find_any_split(text, position)
        if split is not None and split < stop:
            return split
    return None


def find_any_split(text: bytes | memoryview, start: int) -> int | None:
    """Like `find_split`, where there is none: also offsets in other scripts, and in numbers and symbols."""
    match = _ANY_SPLIT.search(text, start, start + _WINDOW_BYTES)
    return match.start() if match else None


# Processing a chunk takes up to a dozen times its size: as text, in parts, as bytes again.
CHUNK_BYTES = 2**22
_BINARY_PROBE_BYTES = 2**13
_Text = TypeVar("_Text")


def utf8(text: str, name: str = "the text") -> bytes:
    """`text` as UTF-8. Raises NapkinError, calling the text `name`, for a lone surrogate, which UTF-8 cannot encode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise NapkinError(
            f"{name} contains a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}, which "
            'UTF-8 cannot encode: read the file with errors="replace", or leave it out'
        ) from None


def split_at(text: str, special_tokens: Collection[str]) -> list[str]:
    """Split text at special tokens: ordinary, special, ordinary, ..., ordinary (an ordinary part may be empty).

    If several special tokens match at one position, the longest is taken.

    >>> split_at("ab<|end|>c", ["<|end|>"])
    ['ab', '<|end|>', 'c']
    """
    if not special_tokens:
        return [text]
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text)


def checked_text_tokens(text_tokens: Collection[str], special_tokens: Collection[str]) -> frozenset[str]:
    """The special tokens that mark no boundary. Raises NapkinError for one that is not a special token."""
    if unknown := sorted(set(text_tokens).difference(special_tokens)):
        raise NapkinError(f"text token {unknown[0]!r} is not one of the special tokens: add it to them, or remove it")
    return frozenset(text_tokens)


def check_special_tokens(special_tokens: Sequence[str]) -> None:
    """Raise NapkinError unless the special tokens are distinct, not empty and valid UTF-8."""
    if isinstance(special_tokens, str):
        raise NapkinError(
            f"special tokens must be a list of strings, got {special_tokens!r}: write [{special_tokens!r}]"
        )
    seen: set[str] = set()
    for token in special_tokens:
        if not token:
            raise NapkinError("a special token is empty: give it at least one character")
        if token in seen:
            raise NapkinError(f"special token {token!r} is given twice: remove one, each has a single id")
        utf8(token, f"special token {token!r}")
        seen.add(token)


def check_texts(texts: Iterable[_Text]) -> Iterable[_Text]:
    """Return `texts`; raise NapkinError if it is a single string, whose characters would be taken for texts."""
    if isinstance(texts, str):
        raise NapkinError(f"a list of texts is needed, got a single text of {len(texts)} characters: put it in a list")
    return texts


def read_chunks(
    paths: Iterable[StrPath],
    special_tokens: Sequence[str] = (),
    *,
    pattern: str = "gpt2",
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[str]:
    """Yield the text of files in chunks of about `chunk_bytes`; a chunk ends with its file.

    A file is split between two pre-tokens and never within a special token, so `train_bpe(read_chunks(...), ...)` gives
    the same merges as whole files, in memory of a few chunks. If no split point is known for the pattern (a regular
    expression, or `whole`) or found in a text, the file is read whole.

    Raises NapkinError for a file that cannot be read, is not UTF-8, or has a NUL in its first 8 KiB, as binary files
    do.
    """
    for path in map(Path, paths):
        try:
            yield from _read(path, special_tokens, pattern in SPLITTABLE_PATTERNS, chunk_bytes)
        except OSError as error:
            raise NapkinError(
                f"'{path}' cannot be read ({error.strerror}): leave it out or make it readable"
            ) from error


def _read(path: Path, special_tokens: Sequence[str], may_split: bool, chunk_bytes: int) -> Iterator[str]:
    start, rest = 0, b""
    with open(path, "rb", opener=regular) as file:
        # A remainder without a split point is searched again. Doubling it each time keeps that linear.
        while data := file.read(max(chunk_bytes, len(rest))):
            if not start and not rest and b"\0" in data[:_BINARY_PROBE_BYTES]:
                raise NapkinError(f"'{path}' contains NUL bytes, so it is not a text file: leave it out or convert it")
            data = rest + data
            split = _last_split(data, special_tokens) if may_split else None
            rest = data if split is None else data[split:]
            if split:
                yield decoded(data[:split], path, start)
                start += split
    if rest:
        yield decoded(rest, path, start)


def _last_split(data: bytes, special_tokens: Sequence[str]) -> int | None:
    """A split point close to the end of `data`; None if there is none."""
    reach = max((len(token.encode()) for token in special_tokens), default=0)
    special = re.compile(b"|".join(re.escape(token.encode()) for token in special_tokens)) if reach else None

    def is_inside(place: int) -> bool:
        around = special.finditer(data, max(place - reach, 0), place + reach) if special else ()
        return any(match.start() < place < match.end() for match in around)

    # A special token, and the text that find_split examines, may extend beyond the end of the data.
    last = len(data) - reach - 1
    for window in (2**8, 2**12, 2**16, len(data)):
        split = find_split(data, max(last - window, 0))
        if split is None and window == len(data):
            split = find_any_split(data, max(last - 2**14, 0))
        while split is not None and split < last and is_inside(split):
            split = find_split(data, split + 1)
        if split is not None and 0 < split < last:
            return split
    return None


def decoded(data: bytes, path: StrPath, start: int) -> str:
    """The bytes of a file from `start` on as text. Raises NapkinError where they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NapkinError(
            f"'{path}' is not UTF-8 at byte {start + error.start}: convert it (iconv -t UTF-8) or leave it out"
        ) from error


# What is decoded at once to be checked: it stays in the processor's cache.
_CHECKED_BYTES = 2**14


def check_utf8(data: bytes, path: StrPath, start: int) -> None:
    """Raise the error of `decoded` where bytes are not UTF-8, without making a string of them all."""
    if data.isascii():
        return
    begin = 0
    try:
        while begin < len(data):
            some = data[begin : begin + _CHECKED_BYTES]
            # A character that is cut here is decoded with what follows.
            begin += len(some) if some.isascii() else utf_8_decode(some, "strict", begin + len(some) == len(data))[1]
    except UnicodeDecodeError:
        decoded(data, path, start)


def check_counted(counts: object) -> None:
    """Raise NapkinError if nothing was counted in the text of a training."""
    if not counts:
        raise NapkinError("there is no text to train on: give at least one text with more than special tokens in it")
