"""Reading the body of a request: bounded in bytes, and in the time that a client may take."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from napkin.inference.server.api_error import ApiError
from napkin.inference.server.connection import REQUEST_DUE
from napkin.inference.server.service import Service

_READ_AND_DROPPED = 4
"""A client that sends up to this many times too much is read to the end, so that it sees the error; a longer body is
cut off."""
_SMALL = 2**16
"""Bytes of a body that is received whatever others send."""
_LARGEST_RECEIVED = 16
"""So many bodies of the largest size may be in memory before they are whole."""


async def read_content(request: Request, service: Service) -> bytes:
    """The body. Raises ApiError if it is not JSON by its type, too large, or too slow in coming."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A form can be sent by any web page without asking first, JSON cannot.
        raise ApiError(415, "the body must be JSON: send Content-Type: application/json", close=True)
    content, total, most = bytearray(), 0, service.limits.max_body_bytes
    counted = 0
    try:
        async with asyncio.timeout_at(getattr(request.state, REQUEST_DUE)):
            async for chunk in request.stream():
                total += len(chunk)
                if total > _READ_AND_DROPPED * most:
                    break
                if total <= most:
                    content += chunk
                if _SMALL < len(content) != counted:
                    service.receiving += len(content) - counted
                    counted = len(content)
                if service.receiving > _LARGEST_RECEIVED * most and counted:
                    message = "large requests of other clients are being received: try again later"
                    raise ApiError(503, message, retry_after=1, close=True)
    except TimeoutError:
        message = f"the request was not whole after {service.limits.stalled_seconds:g} s: send it faster"
        raise ApiError(408, message, close=True) from None
    except ClientDisconnect:
        raise ApiError(499, "the client left", close=True) from None
    finally:
        service.receiving -= counted
    if total > most:
        raise ApiError(413, f"the body has more than {most} bytes: send less", close=True)
    return bytes(content)
