"""The application: routes behind a guard that refuses before anything is read.

The chat page: files beside this one, sent as they are, under a policy that lets nothing else in.
"""

import contextlib
import ipaddress
import re
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from napkin.serving.responses import ApiError
from napkin.serving.routes import chat_completions, completions, health, metrics, models, one_model, service_of
from napkin.serving.service import Service

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No script, style or address but the server's own, none of them inline; the page is in no frame."""


def page_routes() -> list[Route]:
    """A route per file, and `/` for the page."""
    folder = files("napkin.serving") / "page"
    routes = []
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in _TYPES:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            routes.append(_route(path, file.read_bytes(), _TYPES[suffix]))
    return routes


def _route(path: str, content: bytes, kind: str) -> Route:
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}

    async def send(request: Request) -> Response:
        return Response(content, media_type=kind, headers=headers)

    return Route(path, send)


_AUTHORITY = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::[0-9]{0,5})?", re.ASCII)
"""RFC 9110, 4.2 and 7.2: a name or an address, and a port; without user information."""
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


def application(service: Service) -> ASGIApp:
    """The ASGI application that serves one model."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.thread.close()

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
        Route("/metrics", metrics),
        *page_routes(),
    ]
    handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_exception, Exception: _unforeseen}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.state.service = service
    return Guard(app, service)


class Guard:
    """Refuses connections beyond the limit, foreign hosts, wrong keys, and requests while the server drains."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or hand the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            self._service.meters.requests.add("refused")
            await error.response()(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        service, path = self._service, scope["path"]
        headers = dict(reversed(scope["headers"]))
        if path != "/health" and len(service.open) - len(service.waiting) > service.limits.max_connections:
            message = f"there are more than {service.limits.max_connections} connections: try again later"
            raise ApiError(503, message, retry_after=1, close=True)
        if service.hosts is not None:
            _check_source(scope["headers"], service.hosts)
        if path == "/health" or not path.startswith(("/v1/", "/metrics")):
            return
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if not service.is_key(key.strip() if kind.lower() == "bearer" else ""):
            message = "the key is missing or wrong: send Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
        if service.draining and path.startswith("/v1/"):
            raise ApiError(503, "the server is stopping: try another", retry_after=5, close=True)


def _check_source(headers: Sequence[tuple[bytes, bytes]], hosts: frozenset[str]) -> None:
    """Refuse what a web page elsewhere may have sent; without a key nothing else keeps it out."""
    given = {
        name: [value.decode("latin-1") for each, value in headers if each == name] for name in (b"host", b"origin")
    }
    if len(given[b"host"]) != 1 or host_name(given[b"host"][0]) not in hosts:
        # A page elsewhere may have a name that leads to this machine.
        raise ApiError(421, "the server is not known by this name: use its address", close=True)
    own = {f"{scheme}://{given[b'host'][0]}".lower() for scheme in ("http", "https")}
    if not own.issuperset(map(str.lower, given[b"origin"])):
        raise ApiError(403, "the request comes from a web page elsewhere: use the server's own page", close=True)


def host_name(authority: str) -> str | None:
    """The name or address of a Host header, in small letters and without brackets; None where it is malformed.

    >>> host_name("LocalHost:8000"), host_name("[0:0::1]:80"), host_name("[::1].evil.com"), host_name("::1@evil.com")
    ('localhost', '::1', None, None)
    """
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return None
    if found["name"] is not None:
        return found["name"].lower()
    try:
        return ipaddress.IPv6Address(found["address"]).compressed
    except ValueError:
        return None


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    service_of(request).meters.requests.add("refused")
    return error.response()


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def _unforeseen(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed; its log says why").response()
