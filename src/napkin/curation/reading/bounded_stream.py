"""Decompressed bytes of a file, within bounds: gzip with any number of members, zstd with any number of frames.

The kind is told by the first bytes. The decompressor gets little input at a time, so that the output of one call is
bounded whatever is in the file: deflate expands by at most 1,032, a block of zstd of 4 bytes to 128 KiB.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from napkin.errors import zstandard
from napkin.units import format_bytes


@dataclass(frozen=True)
class SetAside:
    """A document, or the rest of a file, that does not go through a pipeline because something is wrong with it."""

    identity: str
    """The document's identity; of a file that could not be opened or read on, its name."""
    reason: str
    """A name from a small set, by which they are counted: `truncated`, `too large`, `broken encoding` ..."""
    detail: str = ""
    offset: int = 0
    """Bytes from the beginning of the (decompressed) file."""


class Unreadable(Exception):
    """Foreign data that cannot be read on from here."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class ReadLimits:
    """Limits on what reading a file may cost."""

    document_bytes: int = 2**25
    """Most bytes of one document, decompressed."""
    ratio: int = 300
    """Decompressed bytes of a file per compressed byte; the first 64 MiB are not counted."""


def too_large(identity: str, size: int, limits: ReadLimits, offset: int) -> SetAside:
    detail = f"{format_bytes(size)} > {format_bytes(limits.document_bytes)}"
    return SetAside(identity, "too large", detail, offset)


FREE_BYTES = 2**26
"""Decompressed bytes that are never too many."""
_READ_BYTES = 2**20
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(bytes([number]) + b"\x2a\x4d\x18" for number in range(0x50, 0x60))
"""First bytes of frames of zstd that have something else in them (RFC 8878, 3.1.2), as pzstd writes them."""
_PIECE_BYTES = {"gzip": 2**14, "zstd": 2**10}
_MAX_WINDOW_BYTES = 2**27


@runtime_checkable
class Stream(Protocol):
    """A source of bytes from which the readers of formats read."""

    def read(self, n_bytes: int, /) -> bytes:
        """Up to that many bytes; none only at the end. Raises Unreadable for damaged data, OSError."""
        ...


def decompressed(file: Stream, ratio: int) -> "Plain | Decompressed":
    """The decompressed bytes of a gzip or zstd file, and those of any other as they are.

    Reading raises Unreadable where the file is damaged, ends too soon, or gives more than `ratio` bytes per byte. Where
    something else follows behind a whole member, its bytes end there, and `refuse_rest` raises Unreadable.
    """
    first = file.read(_READ_BYTES)
    if first.startswith(_GZIP):
        return Decompressed(file, first, "gzip", lambda: zlib.decompressobj(wbits=31), zlib.error, ratio)
    if first.startswith((_ZSTD, *_SKIPPABLE)):
        library = zstandard()
        decompressor = library.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        return Decompressed(file, first, "zstd", decompressor.decompressobj, library.ZstdError, ratio)
    return Plain(file, first)


class Plain:
    """The bytes of a file as they are."""

    def __init__(self, file: Stream, first: bytes) -> None:
        self._file, self._first = file, first

    def read(self, n_bytes: int) -> bytes:
        if not self._first:
            return self._file.read(n_bytes)
        data, self._first = self._first[:n_bytes], self._first[n_bytes:]
        return data

    def refuse_rest(self) -> None: ...

    def file_bytes(self, n_bytes: int) -> int:
        """The number of bytes of the file that its first `n_bytes` decompressed bytes take."""
        return n_bytes


class Decompressed:
    """The bytes of the members of a gzip file, or of the frames of a zstd file, one after another."""

    def __init__(
        self, file: Stream, first: bytes, kind: str, new: Callable[[], Any], errors: type[Exception], ratio: int
    ) -> None:
        self._file, self._kind, self._new, self._errors, self._ratio = file, kind, new, errors, ratio
        self._compressed, self._place = first, 0
        self._decoder: Any = new()
        self._has_begun = False
        """True if a member has begun and not ended."""
        self._member_bytes = 0
        self._n_members = 0
        """Members that have ended."""
        self._ready = b""
        self._problem: Unreadable | None = None
        self._rest: Unreadable | None = None
        self._taken = self._given = 0

    def read(self, n_bytes: int) -> bytes:
        """Up to that many bytes. Raises Unreadable, once what came before it is given, and OSError."""
        parts, size = [self._ready], len(self._ready)
        while size < n_bytes and self._problem is None and self._rest is None:
            if self._place == len(self._compressed):
                self._compressed, self._place = self._file.read(_READ_BYTES), 0
            piece = self._compressed[self._place : self._place + _PIECE_BYTES[self._kind]]
            self._place += len(piece)
            if not piece:
                if self._has_begun:
                    how = f"its {self._kind} data ends too soon, after {self._taken:,} bytes"
                    self._problem = Unreadable("truncated", how)
                break
            try:
                parts.append(self._decompress(piece))
            except Unreadable as error:
                self._problem = error
                break
            size += len(parts[-1])
        whole = b"".join(parts)
        data, self._ready = whole[:n_bytes], whole[n_bytes:]
        # The bytes before the damage are returned first.
        if not data and self._problem is not None:
            raise self._problem
        return data

    def refuse_rest(self) -> None:
        """Raise Unreadable if anything but a member follows the last whole member."""
        if self._rest is not None:
            raise self._rest

    def file_bytes(self, n_bytes: int) -> int:
        """About how many bytes of the file give its first `n_bytes` bytes, by what it was read at so far."""
        return round(n_bytes * self._taken / self._given) if self._given else self._taken

    def _decompress(self, piece: bytes) -> bytes:
        if not self._has_begun:
            # Zeros after the last member are padding.
            if not piece.strip(b"\0"):
                self._taken += len(piece)
                return b""
            self._decoder, self._has_begun, self._member_bytes = self._new(), True, 0
        try:
            data = self._decoder.decompress(piece)
        except self._errors as error:
            if self._n_members and not self._member_bytes:
                # The members before it are whole, and gunzip returns them too.
                how = f"the data after byte {self._taken:,} is not {self._kind} data; what comes before it is read"
                self._rest = Unreadable("damaged", how)
                return b""
            how = f"its {self._kind} data is damaged near byte {self._taken:,} ({error})"
            raise Unreadable("damaged", how) from None
        self._member_bytes += len(data)
        rest = 0
        if self._decoder.eof:
            rest = len(self._decoder.unused_data)
            self._has_begun = False
            self._n_members += 1
            self._place -= rest
        self._taken += len(piece) - rest
        self._given += len(data)
        if self._given > max(FREE_BYTES, self._ratio * self._taken):
            raise Unreadable(
                "zip bomb",
                f"{format_bytes(self._taken)} of {self._kind} data give more than {format_bytes(self._given)}, "
                f"the limit is {self._ratio} per byte",
            )
        return data
