"""Reading the body of a request: bounded in bytes, and in the time that a client may take."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from napkin.inference.server.api_error import ApiError
from napkin.inference.server.limits import Limits

_READ_AND_DROPPED = 4
"""A client that sends up to this many times too much is read to the end, so that it sees the error; a longer body is
cut off."""


async def read_content(request: Request, limits: Limits) -> bytes:
    """The body. Raises ApiError if it is not JSON by its type, too large, or too slow in coming."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A form can be sent by any web page without asking first, JSON cannot.
        raise ApiError(415, "the body must be JSON: send Content-Type: application/json", close=True)
    content, total, most = bytearray(), 0, limits.max_body_bytes
    chunks = request.stream().__aiter__()
    while True:
        try:
            async with asyncio.timeout(limits.stalled_seconds):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            break
        except TimeoutError:
            message = f"no more of the body came for {limits.stalled_seconds:g} s: send it faster"
            raise ApiError(408, message, close=True) from None
        except ClientDisconnect:
            raise ApiError(499, "the client left", close=True) from None
        total += len(chunk)
        if total <= most:
            content += chunk
        elif total > _READ_AND_DROPPED * most:
            break
    if total > most:
        raise ApiError(413, f"the body has more than {most} bytes: send less", close=True)
    return bytes(content)
