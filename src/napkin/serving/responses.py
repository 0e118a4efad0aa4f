"""Errors as OpenAI's interface has them: a status, and a JSON object that says what was wrong.

Values as JSON, in a response or in an event of a stream.
"""

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


_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """What a client is told: `status` of HTTP, a message of one line, the field that is wrong, a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.field, self.code = status, field, code
        self.retry_after, self.close = retry_after, close

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}

    def response(self) -> Response:
        """The response; `close` ends the connection, of which the rest is not read."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.close:
            headers["connection"] = "close"
        return json_response(self.body(), self.status, headers)
