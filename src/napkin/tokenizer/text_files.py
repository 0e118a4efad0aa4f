"""Files of any size as texts of a bearable one, cut so that a tokenizer gives the same ids and learns the same
merges."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.tokenizer.compiled.cuts import CUTTABLE_PATTERNS, find_cut

# A piece takes up to a dozen times as much while it is worked on: as text, in parts, as bytes again.
CHUNK_BYTES = 2**22
_PROBE_BYTES = 2**13


def read_chunks(
    paths: Iterable[StrPath],
    special_tokens: Sequence[str] = (),
    *,
    pattern: str = "gpt2",
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[str]:
    """Yield the text of files in pieces of about `chunk_bytes`; a piece ends with its file.

    A file is cut where every pre-token ends and no special token stands, so `train_bpe(read_chunks(...), ...)` learns
    what it would from whole files, in memory of a few pieces. Where a pattern is not known to end pre-tokens anywhere
    (a regular expression, or `whole`), or a text has no such place, it is read whole.

    Raises NapkinError for a file that cannot be read, is not UTF-8, or holds NUL in its first 8 KiB, as binary files
    do.
    """
    for path in map(Path, paths):
        try:
            yield from _read(path, special_tokens, pattern in CUTTABLE_PATTERNS, chunk_bytes)
        except OSError as error:
            raise NapkinError(
                f"'{path}' cannot be read ({error.strerror}): leave it out or make it readable"
            ) from error


def _read(path: Path, special_tokens: Sequence[str], may_cut: bool, chunk_bytes: int) -> Iterator[str]:
    start, rest = 0, b""
    with open(path, "rb") as file:
        # A rest that cannot be cut is looked through again: with as much behind it, or that would take forever.
        while data := file.read(max(chunk_bytes, len(rest))):
            if not start and not rest and b"\0" in data[:_PROBE_BYTES]:
                raise NapkinError(f"'{path}' holds NUL bytes as no text does: give a text file or convert it")
            data = rest + data
            cut = _last_cut(data, special_tokens) if may_cut else None
            rest = data if cut is None else data[cut:]
            if cut:
                yield _decode(path, data[:cut], start)
                start += cut
    if rest:
        yield _decode(path, rest, start)


def _last_cut(data: bytes, special_tokens: Sequence[str]) -> int | None:
    """A place to cut not far from the end."""
    reach = max((len(token.encode()) for token in special_tokens), default=0)
    special = re.compile(b"|".join(re.escape(token.encode()) for token in special_tokens)) if reach else None
    # What begins before the end may go on behind it: a special token, and the window that find_cut looks through.
    last = len(data) - reach - 1
    for window in (2**8, 2**12, 2**16, len(data)):
        cut = find_cut(data, max(last - window, 0))
        while cut is not None and cut < last and special and _is_inside(special, data, cut, reach):
            cut = find_cut(data, cut + 1)
        if cut is not None and 0 < cut < last:
            return cut
    return None


def _is_inside(special: re.Pattern[bytes], data: bytes, cut: int, reach: int) -> bool:
    around = special.finditer(data, max(cut - reach, 0), cut + reach)
    return any(match.start() < cut < match.end() for match in around)


def _decode(path: Path, data: bytes, start: int) -> str:
    try:
        return codecs.decode(data, "utf-8")
    except UnicodeDecodeError as error:
        raise NapkinError(
            f"'{path}' is not UTF-8 at byte {start + error.start}: convert it (iconv -t UTF-8) or leave it out"
        ) from error
