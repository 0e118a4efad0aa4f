"""Shared by the routes of all pages: bodies of requests, answers in JSON, and the check that a request may change
anything."""

from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from napkin.errors import first_line
from napkin.serving.loopback import is_of_own_page

MOST_REQUEST_BYTES = 2**16

Body = TypeVar("Body", bound=msgspec.Struct)


async def content_of(request: Request, most: int = MOST_REQUEST_BYTES) -> bytes:
    """The body of a request as bytes. Raises HTTPException for one that is longer than `most`."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > most:
            raise HTTPException(413, f"the request is longer than {most:,} bytes")
    return bytes(content)


async def body_of(request: Request, kind: type[Body], most: int = MOST_REQUEST_BYTES) -> Body:
    """The JSON body of a request. Raises HTTPException for one that is too long or of another form."""
    try:
        return msgspec.json.decode(await content_of(request, most), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, first_line(error)) from None


def as_json(value: Any, status: int = 200) -> Response:
    """A response in JSON; numbers that are not finite are null."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def refuse_unless_allowed(request: Request) -> None:
    """Raise HTTPException if the studio is read-only, as it is without --allow-actions, or if no browser confirms that
    a page of the studio sent the request: writing or starting anything needs both."""
    if not request.app.state.allow_actions:
        raise HTTPException(403, "this studio only shows: start it with --allow-actions to write or start anything")
    if not is_of_own_page(request.scope["headers"]):
        raise HTTPException(403, "the request does not say which page has sent it: use the studio's own page")
