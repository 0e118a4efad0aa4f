"""HTTP messages as web archives keep them: status, headers and body (RFC 9112)."""

import re
from collections.abc import Callable

from napkin.curation.reading.set_aside import Unreadable

Headers = dict[str, str]
"""By name, in small letters; of one that is repeated, the first."""

_STATUS = re.compile(rb"HTTP/\d(?:\.\d)? (\d{3})[^\n]*\n")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[^\n]*\n")


def parse_headers(lines: bytes) -> Headers:
    """Header lines; a line that is none is left out."""
    headers: Headers = {}
    for line in lines.decode("utf-8", "replace").split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.strip().lower(), value.strip())
    return headers


def body_of_response(message: bytes, inflate: Callable[[bytes], bytes]) -> tuple[int, str, bytes]:
    """Status, content type and body of a response.

    Raises Unreadable for what is not one, or a body that was sent in a way that is not known; `inflate` may too.
    """
    status = _STATUS.match(message)
    if status is None:
        raise Unreadable("not HTTP", "it does not begin with a status line")
    end = re.compile(rb"\r?\n\r?\n").search(message, status.end() - 2)
    if end is None:
        raise Unreadable("not HTTP", "its headers do not end")
    headers, body = parse_headers(message[status.end() : end.start()]), message[end.end() :]
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _joined(body)
    encoding = headers.get("content-encoding", "").lower()
    # Many archives keep the header of a body that they have decoded.
    if body.startswith(b"\x1f\x8b"):
        body = inflate(body)
    elif encoding in ("br", "zstd", "deflate", "compress") and body.lstrip()[:1] != b"<":
        raise Unreadable("content encoding", f"'{encoding}' is not read")
    return int(status[1]), headers.get("content-type", ""), body


def _joined(body: bytes) -> bytes:
    """The chunks of a body together; as it is where it is not in chunks, as many archives have joined them."""
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
