"""Web archives (WARC 1.0 and 1.1, ISO 28500): responses of servers (WARC) and texts extracted from them (WET).

A record is header lines, an empty line, as many bytes as its Content-Length says, and two line ends. Where those do not
follow, the length is wrong: the record is set aside, and reading continues at the next record. Responses are HTTP
messages: status, headers and body (RFC 9112).
"""

import io
import re
from collections.abc import Iterator

from napkin.curation.reading.bounded_stream import ReadLimits, SetAside, Stream, Unreadable, decompressed, too_large
from napkin.curation.stage import Record

Headers = dict[str, str]
"""Values by name in small letters; of a repeated name, the first."""

_STATUS = re.compile(rb"HTTP/\d(?:\.\d)? (\d{3})[^\n]*\n")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[^\n]*\n")
_READ_BYTES = 2**18
_MOST_HEADER_BYTES = 2**16
_END = b"\r\n\r\n"
_NEXT = re.compile(rb"\r?\n\r?\nWARC/1\.\d\r?\n")
_BEGIN = re.compile(rb"(?<![^\n])WARC/1\.\d\r?\n")
_BOUNDARY_BYTES = 16
_HEADERS_END = re.compile(rb"\r?\n\r?\n")


def read_warc(stream: Stream, name: str, limits: ReadLimits) -> Iterator[Record | SetAside]:
    """The documents of an archive; the number of each is that of its record, of whatever type."""
    archive, number = _Archive(stream), 0
    while True:
        offset, strays = archive.to_next_record()
        if strays:
            yield SetAside(name, "not a record", f"{strays:,} bytes between records", offset - strays)
        if archive.at_end:
            return
        number += 1
        record = _read_record(archive, Record(f"{name}#{number}", source=name, offset=offset), limits)
        if record is not None:
            yield record


def _read_record(archive: "_Archive", record: Record, limits: ReadLimits) -> Record | SetAside | None:
    """The document that begins here, or why it is set aside; None for a record of another type."""
    identity, offset, headers = record.identity, record.offset, archive.headers()
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal() and len(length) < 19):
        return SetAside(identity, "wrong length", f"its Content-Length is {length[:30]!r}", offset)
    n_bytes = int(length)
    most = limits.document_bytes + _MOST_HEADER_BYTES
    body = archive.take(n_bytes) if n_bytes <= most else b""
    is_whole = (len(body) if n_bytes <= most else archive.skip(n_bytes)) == n_bytes
    if not is_whole or not archive.takes_end():
        # A length that is too large has swallowed the records that follow.
        if match := _NEXT.search(body):
            archive.give_back(body[match.start() :])
        how = "it does not end there" if is_whole else "the file ends first"
        return SetAside(identity, "wrong length", f"its Content-Length says {n_bytes:,} bytes, {how}", offset)
    if headers.get("warc-type") not in ("response", "resource", "conversion"):
        return None
    if n_bytes > most:
        return too_large(identity, n_bytes, limits, offset)
    record.address = headers.get("warc-target-uri", "").strip("<>")
    if date := headers.get("warc-date"):
        record.fields["date"] = date
    content_type = headers.get("content-type", "")
    if headers["warc-type"] == "response":
        try:
            status, content_type, body = _body_of_response(body, limits)
        except Unreadable as error:
            return SetAside(identity, error.reason, error.detail, offset)
        if status != 200:
            return SetAside(identity, "HTTP status", str(status), offset)
    if len(body) > limits.document_bytes:
        return too_large(identity, len(body), limits, offset)
    record.media_type = content_type.partition(";")[0].strip().lower() or "application/octet-stream"
    if "charset" in content_type.lower():
        record.fields["content_type"] = content_type
    if record.media_type == "text/plain":
        try:
            record.text = body.decode()
            return record
        except UnicodeDecodeError:
            pass
    record.content = body
    return record


def _parse_headers(lines: bytes) -> Headers:
    """Header lines as a mapping; malformed lines are left out."""
    headers: Headers = {}
    for line in lines.decode("utf-8", "replace").split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.strip().lower(), value.strip())
    return headers


def _body_of_response(message: bytes, limits: ReadLimits) -> tuple[int, str, bytes]:
    """Status, content type and body of a response.

    Raises Unreadable for what is not one, and for a body that was sent in an unknown way or is too large.
    """
    status = _STATUS.match(message)
    if status is None:
        raise Unreadable("not HTTP", "it does not begin with a status line")
    end = _HEADERS_END.search(message, status.end() - 2)
    if end is None:
        raise Unreadable("not HTTP", "its headers do not end")
    headers, body = _parse_headers(message[status.end() : end.start()]), message[end.end() :]
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _joined(body)
    encoding = headers.get("content-encoding", "").lower()
    # Many archives keep the header of a body that they have decoded.
    if body.startswith(b"\x1f\x8b"):
        body = _inflated(body, limits)
    elif encoding in ("br", "zstd", "deflate", "compress") and body.lstrip()[:1] != b"<":
        raise Unreadable("content encoding", f"'{encoding}' is not read")
    return int(status[1]), headers.get("content-type", ""), body


def _joined(body: bytes) -> bytes:
    """The joined chunks of a body; unchanged where it is not in chunks, since many archives have joined them
    already."""
    parts, place = [], 0
    while chunk := _CHUNK.match(body, place):
        size, begin = int(chunk[1], 16), chunk.end()
        parts.append(body[begin : begin + size])
        if size == 0:
            return b"".join(parts)
        place = begin + size
        if body[place : place + 2] != b"\r\n":
            break
        place += 2
    return body


def _inflated(data: bytes, limits: ReadLimits) -> bytes:
    """The bytes of a body that was sent as gzip."""
    stream, parts, size = decompressed(io.BytesIO(data), limits.ratio), [], 0
    while part := stream.read(_READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > limits.document_bytes:
            raise Unreadable("too large", f"its body of {len(data):,} bytes is larger than the limit once inflated")
    return b"".join(parts)


def _unless_line_ends(data: bytes) -> int:
    """Number of bytes between two records; 0 if they are line ends alone."""
    return len(data) if data.strip(b"\r\n") else 0


class _Archive:
    """An archive that is read forwards, with what was read too far given back."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._buffer, self._place, self._offset = stream, b"", 0, 0
        """The buffer begins at `_offset` in the file; what follows `_place` in it was not taken yet."""

    @property
    def at_end(self) -> bool:
        return not self._fill(1)

    def to_next_record(self) -> tuple[int, int]:
        """Go to the next record, or to the end; its offset, and the bytes before it that are not line ends."""
        strays = 0
        while self._fill(_BOUNDARY_BYTES) or self._place < len(self._buffer):
            if match := _BEGIN.search(self._buffer, self._place):
                strays += _unless_line_ends(self._buffer[self._place : match.start()])
                self._place = match.start()
                break
            # The possible beginning of a record is kept, and the character before it.
            left = len(self._buffer) - self._place
            skipped = left - _BOUNDARY_BYTES if self._read_more() else left
            if skipped > 0:
                strays += _unless_line_ends(self._buffer[self._place : self._place + skipped])
                self._place += skipped
        return self._offset + self._place, strays

    def headers(self) -> Headers:
        """The headers of the record that begins here; none where they do not end in time."""
        self._fill(_MOST_HEADER_BYTES)
        match = _HEADERS_END.search(self._buffer, self._place, self._place + _MOST_HEADER_BYTES)
        first_line_end = self._buffer.index(b"\n", self._place) + 1
        if match is None:
            self._place = first_line_end
            return {}
        lines = self._buffer[first_line_end : match.start()]
        self._place = match.end()
        return _parse_headers(lines)

    def take(self, n_bytes: int) -> bytes:
        """The next bytes; fewer at the end of the file."""
        self._fill(n_bytes)
        data = self._buffer[self._place : self._place + n_bytes]
        self._place += len(data)
        return data

    def skip(self, n_bytes: int) -> int:
        """Skip this many bytes; returns how many there were."""
        left = n_bytes
        while left and self._fill(1):
            step = min(left, len(self._buffer) - self._place)
            self._place += step
            left -= step
        return n_bytes - left

    def takes_end(self) -> bool:
        """Take what ends a record, and return True if it, or the end of the file, is here."""
        self._fill(len(_END))
        for end in (_END, b"\n\n"):
            if self._buffer.startswith(end, self._place):
                self._place += len(end)
                return True
        # Some writers leave out what would end the last record.
        rest = self._buffer[self._place :]
        return len(rest) < len(_END) and not rest.strip(b"\r\n")

    def give_back(self, data: bytes) -> None:
        """Put back the bytes that were taken last, to be read again."""
        self._offset += self._place - len(data)
        self._buffer, self._place = data + self._buffer[self._place :], 0

    def _fill(self, n_bytes: int) -> bool:
        """Read until the buffer has that many bytes; False if the file ends before."""
        missing = n_bytes - (len(self._buffer) - self._place)
        return missing <= 0 or self._read_more(missing) >= missing

    def _read_more(self, n_bytes: int = _READ_BYTES) -> int:
        """Read about so many bytes into the buffer; how many came, none only at the end."""
        # The character before the place tells whether a line begins there.
        kept = max(self._place - 1, 0)
        parts, size = [self._buffer[kept:]], 0
        while size < n_bytes and (block := self._stream.read(max(_READ_BYTES, n_bytes - size))):
            parts.append(block)
            size += len(block)
        self._buffer, self._offset = b"".join(parts), self._offset + kept
        self._place -= kept
        return size
