"""The text that tokenizers accept: its validation, its special tokens, and reading it from files of any size."""

import codecs
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from napkin.errors import NapkinError
from napkin.files import StrPath, regular
from napkin.tokenizer.split_points import SPLITTABLE_PATTERNS, find_any_split, find_split

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
                yield _decode(path, data[:split], start)
                start += split
    if rest:
        yield _decode(path, rest, start)


def _last_split(data: bytes, special_tokens: Sequence[str]) -> int | None:
    """A split point close to the end of `data`; None if there is none."""
    reach = max((len(token.encode()) for token in special_tokens), default=0)
    special = re.compile(b"|".join(re.escape(token.encode()) for token in special_tokens)) if reach else None
    # A special token, and the text that find_split examines, may extend beyond the end of the data.
    last = len(data) - reach - 1
    for window in (2**8, 2**12, 2**16, len(data)):
        split = find_split(data, max(last - window, 0))
        if split is None and window == len(data):
            split = find_any_split(data, max(last - 2**14, 0))
        while split is not None and split < last and special and _is_inside(special, data, split, reach):
            split = find_split(data, split + 1)
        if split is not None and 0 < split < last:
            return split
    return None


def _is_inside(special: re.Pattern[bytes], data: bytes, split: int, reach: int) -> bool:
    around = special.finditer(data, max(split - reach, 0), split + reach)
    return any(match.start() < split < match.end() for match in around)


def _decode(path: Path, data: bytes, start: int) -> str:
    try:
        return codecs.decode(data, "utf-8")
    except UnicodeDecodeError as error:
        raise NapkinError(
            f"'{path}' is not UTF-8 at byte {start + error.start}: convert it (iconv -t UTF-8) or leave it out"
        ) from error
