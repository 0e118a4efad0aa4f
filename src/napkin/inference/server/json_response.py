"""Values as JSON, in a response or in an event of a stream."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
"""What ends a stream."""


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a JSON body; numbers that are not finite are null."""
    return Response(_encode(value), status, headers=dict(headers or {}), media_type="application/json")


def event(value: Any) -> bytes:
    """A server-sent event. One line of data is enough: line breaks in strings are escaped, and there are no others."""
    return b"data: " + _encode(value) + b"\n\n"
