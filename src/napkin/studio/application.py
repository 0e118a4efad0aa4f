"""The studio's pages and their requests: an ASGI application behind a gate that admits whoever has the token.

The address that `napkin studio` prints has the token in it. It becomes a cookie that no script reads and no other site
sends, so that neither a page elsewhere nor another user of this machine can ask for anything.
"""

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from napkin.errors import NapkinError, first_line
from napkin.files import StrPath
from napkin.serving.loopback import Headers, refusal_of_source, with_headers
from napkin.studio.chat_routes import CHAT_ROUTES, prepare_chat
from napkin.studio.corpora import corpora_below
from napkin.studio.data_routes import DATA_ROUTES
from napkin.studio.learn.ideas import IDEAS, LEARN, idea_page, index_page
from napkin.studio.page_files import ASSETS, PAGES, page
from napkin.studio.plans import PlanRequest, plan_by_count, planner_catalogue, recipe_text, rules_script
from napkin.studio.requests import as_json, body_of
from napkin.studio.run_routes import RUN_ROUTES, RunDesk
from napkin.studio.services import ServiceRequest, plan_service_curves, service_catalogue
from napkin.studio.texts import BYTES, encoded, merged

Answer = TypeVar("Answer")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Scripts, styles and addresses of this server only, nothing inline, and no framing of the page."""
MOST_TOKENIZERS = 12
_TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html"}


class Superseded(Exception):
    """Raised in a count that is no longer needed, because a newer one was requested."""


class Newest:
    """Runs one piece of work at a time in a thread; a newer request ends the one before at its next progress."""

    def __init__(self) -> None:
        self._number, self._lock = 0, asyncio.Lock()

    async def run(self, work: Callable[[Callable[[str], None]], Answer]) -> Answer:
        """Raises Superseded where a newer request has come."""
        self._number += 1
        mine = self._number

        def progress(doing: str) -> None:
            if mine != self._number:
                raise Superseded

        async with self._lock:
            progress("waiting")
            return await asyncio.to_thread(work, progress)


def application(*, token: str, hosts: frozenset[str], folder: StrPath, allow_actions: bool = False) -> ASGIApp:
    """The studio of the runs below a folder, for requests that have the token and come by a name in `hosts`.

    Nothing is written or started for a page without `allow_actions`.
    """
    routes = [
        *(Route(path, functools.partial(_page, path)) for path in PAGES if path != LEARN),
        Route(LEARN, _learn),
        Route(LEARN + "/{idea}", _idea),
        Route("/api/learn/{idea}", _idea_answer, methods=["POST"]),
        Route("/assets/{name}", _asset),
        Route("/api/planner/catalogue", _catalogue),
        Route("/api/planner/plan", _plan, methods=["POST"]),
        Route("/api/planner/recipe", _recipe, methods=["POST"]),
        Route("/api/services/catalogue", _service_catalogue),
        Route("/api/services/curves", _service_curves, methods=["POST"]),
        *RUN_ROUTES,
        Route("/api/tokenizers", _tokenizers),
        Route("/api/tokenizers/encode", _encode, methods=["POST"]),
        Route("/api/tokenizers/merges", _merges, methods=["POST"]),
        *CHAT_ROUTES,
        *DATA_ROUTES,
    ]
    handlers: dict[Any, Any] = {
        NapkinError: _napkin_error,
        Superseded: _superseded,
        HTTPException: _http_exception,
        Exception: _unforeseen,
    }

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await app.state.shelf.close()

    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.state.newest, app.state.newest_curves, app.state.desk = Newest(), Newest(), RunDesk(folder)
    app.state.allow_actions = allow_actions
    app.state.corpora = corpora_below(folder)
    prepare_chat(app, folder)
    return Gate(app, token, hosts)


class Gate:
    """Refuses what comes from elsewhere or has no token, and says to browsers what a page may do."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]) -> None:
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, exchange a token for a cookie, or hand the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        await self._answer(scope)(scope, receive, with_headers(send, _policy))

    def _answer(self, scope: Scope) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        refusal = refusal_of_source(scope["headers"], self._hosts)
        if refusal is not None:
            return PlainTextResponse(refusal[1] + "\n", refusal[0])
        request = Request(scope)
        server = scope.get("server") or ("", 0)
        # Cookies do not know ports: two studios of one machine have two names.
        cookie = f"napkin-studio-{server[1]}"
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1]
        if given and request.method == "GET":
            if not self._is_token(given):
                return PlainTextResponse(_NO_TOKEN, 403)
            known = {*PAGES, *(f"{LEARN}/{idea}" for idea in IDEAS)}
            answer = RedirectResponse(scope["path"] if scope["path"] in known else "/", 303)
            answer.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            return answer
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if self._is_token(request.cookies.get(cookie, "")) or (kind.lower() == "bearer" and self._is_token(key)):
            return self._app
        return PlainTextResponse(_NO_TOKEN, 403)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _policy(given: Headers) -> Headers:
    """The headers of the studio's own pages; a report brings its policy along."""
    policy = [] if b"content-security-policy" in dict(given) else [(b"content-security-policy", POLICY.encode())]
    return [*policy, (b"cache-control", b"no-store")]


_NO_TOKEN = "This page needs the token of the studio: open the address that `napkin studio` printed.\n"


async def _page(path: str, request: Request) -> Response:
    return Response(page(path), media_type="text/html")


async def _learn(request: Request) -> Response:
    return Response(index_page(), media_type="text/html")


async def _idea(request: Request) -> Response:
    page = idea_page(request.path_params["idea"])
    if page is None:
        raise HTTPException(404, f"there is no idea '{request.path_params['idea']}' here")
    return Response(page, media_type="text/html")


async def _idea_answer(request: Request) -> Response:
    idea = IDEAS.get(request.path_params["idea"])
    if idea is None:
        raise HTTPException(404, f"there is no idea '{request.path_params['idea']}' here")
    return as_json(await asyncio.to_thread(idea.answer, await body_of(request, idea.request)))


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name == "rules.js":
        return Response(rules_script(), media_type="text/javascript")
    if name not in ASSETS:
        raise HTTPException(404, f"there is no '{name}' here")
    return Response(ASSETS[name].read_bytes(), media_type=_TYPES[name.rpartition(".")[2]])


async def _catalogue(request: Request) -> Response:
    return as_json(planner_catalogue())


async def _plan(request: Request) -> Response:
    asked = await body_of(request, PlanRequest)
    return as_json(await request.app.state.newest.run(functools.partial(plan_by_count, asked)))


async def _recipe(request: Request) -> Response:
    return PlainTextResponse(recipe_text(await body_of(request, PlanRequest)))


async def _service_catalogue(request: Request) -> Response:
    return as_json(service_catalogue())


async def _service_curves(request: Request) -> Response:
    asked = await body_of(request, ServiceRequest)
    return as_json(await request.app.state.newest_curves.run(functools.partial(plan_service_curves, asked)))


class EncodeRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A text, and the tokenizers to encode it with."""

    text: str
    names: list[str]


class MergesRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The request for the merges by which a tokenizer builds a piece of text."""

    text: str
    name: str


async def _tokenizers(request: Request) -> Response:
    return as_json([BYTES, *await asyncio.to_thread(request.app.state.desk.index.tokenizers.find)])


async def _encode(request: Request) -> Response:
    asked = await body_of(request, EncodeRequest)
    if len(asked.names) > MOST_TOKENIZERS:
        raise HTTPException(400, f"{len(asked.names)} tokenizers are asked for: use up to {MOST_TOKENIZERS}")
    chosen = [(name, _tokenizer_path(request, name)) for name in asked.names]
    return as_json(await asyncio.to_thread(encoded, asked.text, chosen))


async def _merges(request: Request) -> Response:
    asked = await body_of(request, MergesRequest)
    return as_json(await asyncio.to_thread(merged, asked.text, _tokenizer_path(request, asked.name)))


def _tokenizer_path(request: Request, name: str) -> Path | None:
    """The file of a tokenizer, or None for bytes. Raises NapkinError for a name that was not found."""
    return None if name == BYTES else request.app.state.desk.index.tokenizers.path_of(name)


async def _napkin_error(request: Request, error: Exception) -> Response:
    return as_json({"error": first_line(error)}, 422)


async def _superseded(request: Request, error: Exception) -> Response:
    return as_json({"error": "a newer plan was asked for"}, 409)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return as_json({"error": error.detail}, error.status_code)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return as_json({"error": f"this should not happen: {type(error).__name__}: {first_line(error)}"}, 500)
