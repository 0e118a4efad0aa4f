"""The application: routes of OpenAI's interface, behind a guard that refuses before anything is read.

The chat page is files beside this one, sent as they are, under a policy that lets nothing else in.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from napkin.chats.chat_format import Message
from napkin.chats.tool_calls import CallReader
from napkin.errors import NapkinError
from napkin.serving.answers import AnswerForm, EventStream, answer_at_once
from napkin.serving.completion_job import CompletionJob, Prompt, check_sequences
from napkin.serving.limits import CONTENT_TYPE
from napkin.serving.loopback import refusal_of_source, with_headers
from napkin.serving.request_body import ApiError, Body, ChatBody, CompletionBody, SharedFields, json_response, read_body
from napkin.serving.service import REQUEST_DUE, Service
from napkin.serving.tools import ToolTurns, can_call_tools, uses_tools

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Scripts, styles and addresses of this server only, nothing inline, and no framing of the page."""


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

        send = with_headers(send)
        try:
            self._check(scope)
        except ApiError as error:
            self._service.meters.requests.add("refused")
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        service, path = self._service, scope["path"]
        headers = dict(reversed(scope["headers"]))
        if path != "/health" and len(service.open) - len(service.waiting) > service.limits.max_connections:
            message = f"there are more than {service.limits.max_connections} connections: try again later"
            raise ApiError(503, message, retry_after=1, close=True)
        if service.hosts is not None:
            refusal = refusal_of_source(scope["headers"], service.hosts)
            if refusal is not None:
                raise ApiError(*refusal, close=True)
        if path == "/health" or not path.startswith(("/v1/", "/metrics")):
            return
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if not service.is_key(key.strip() if kind.lower() == "bearer" else ""):
            message = "the key is missing or wrong: send Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
        if service.draining and path.startswith("/v1/"):
            raise ApiError(503, "the server is stopping: try another", retry_after=5, close=True)


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


def page_routes() -> list[Route]:
    """A route per file of the chat page, and `/` for the page."""

    def route(path: str, content: bytes, kind: str) -> Route:
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}

        async def send(request: Request) -> Response:
            return Response(content, media_type=kind, headers=headers)

        return Route(path, send)

    routes = []
    for file in sorted((files("napkin.serving") / "page").iterdir(), key=lambda each: each.name):
        kind = {"html": "text/html", "js": "text/javascript", "css": "text/css"}.get(file.name.rpartition(".")[2])
        if kind is not None:
            routes.append(route("/" if file.name == "index.html" else f"/{file.name}", file.read_bytes(), kind))
    return routes


_PARSED_IN_PLACE = 2**18
"""Bytes of JSON that are soon read; more are read in another thread."""
_Encoded = TypeVar("_Encoded")
_ENCODED_IN_PLACE = 20_000
"""Characters that are turned into tokens in less than a step of the engine takes; more go to another thread."""


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    service = service_of(request)
    body = await _body(request, service, CompletionBody)
    return await _answer(request, body, *await completion_job(service, body))


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    service = service_of(request)
    body = await _body(request, service, ChatBody)
    return await _answer(request, body, *await chat_job(service, body))


async def completion_job(service: Service, body: CompletionBody) -> tuple[CompletionJob, AnswerForm]:
    """Submit the prompts of a request. Raises ApiError for what cannot be computed."""
    given = body.prompts()
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    check_sequences(service.limits, len(given), body.n)
    encoded = await _encoded(
        service, [len(text) for text in texts], lambda: [service.opened.encode_prompt(text) for text in texts]
    )
    prompts = [Prompt(ids, len(service.opened.start_ids)) for ids in encoded]
    prompts += [Prompt(prompt) for prompt in given if not isinstance(prompt, str)]
    return _submitted(service, body, prompts, max_tokens=body.max_tokens, logprobs=body.logprobs, echo=body.echo)


async def chat_job(service: Service, body: ChatBody) -> tuple[CompletionJob, AnswerForm]:
    """Submit the conversation of a request. Raises ApiError for what cannot be computed."""
    messages = [Message(each.role, each.text(place)) for place, each in enumerate(body.messages)]
    tools = ToolTurns(service.opened, body) if uses_tools(body) else None
    # Each message takes at least one token, whatever its content.
    n_characters = sum(max(service.longest_token, len(each.role) + len(each.content)) for each in messages)
    n_characters += 0 if tools is None else tools.n_characters

    def encode() -> list[int]:
        return service.opened.chat_format.encode(messages) if tools is None else tools.encode()

    # A template is rendered by another process, which is waited for in a thread.
    ids = await _encoded(service, [n_characters], encode, in_thread=True)
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if most is None:
        most = max(1, service.opened.model.config.context_length - len(ids))
        if service.limits.max_tokens_per_request is not None:
            most = max(1, min(most, service.limits.max_tokens_per_request // body.n - len(ids)))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    stop = service.opened.chat_format.stop
    # The text of an answer that had to begin as a call goes on.
    n_hidden = 0 if tools is not None and tools.begun else len(ids)
    prompts = [Prompt(ids, n_hidden)]
    reader = None if tools is None else tools.reader
    return _submitted(service, body, prompts, max_tokens=most, logprobs=logprobs, stop=stop, reader=reader)


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [described(service_of(request))]})


async def one_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    service = service_of(request)
    _check_name(service, request.path_params["name"])
    return json_response(described(service))


async def health(request: Request) -> Response:
    """GET /health: 200 while requests are taken."""
    service = service_of(request)
    status = "failed" if service.thread.failure is not None else "draining" if service.draining else "ok"
    return json_response({"status": status}, 200 if status == "ok" else 503)


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    return PlainTextResponse(service_of(request).metrics_text(), headers={"content-type": CONTENT_TYPE})


def service_of(request: Request) -> Service:
    """The service that the application was made for."""
    return request.app.state.service


async def _body(request: Request, service: Service, kind: type[Body]) -> Body:
    content = await _read_content(request, service)
    large = len(content) > _PARSED_IN_PLACE
    body = await asyncio.to_thread(read_body, content, kind) if large else read_body(content, kind)
    if body.model is not None:
        _check_name(service, body.model)
    return body


async def _encoded(
    service: Service, lengths: Sequence[int], encode: Callable[[], _Encoded], *, in_thread: bool = False
) -> _Encoded:
    """Encode texts into tokens. Raises ApiError for what cannot be encoded or is too long for a
    prompt, which is not encoded first."""
    longest, limit = max(lengths, default=0), service.opened.model.config.context_length
    if longest > limit * service.longest_token:
        message = f"the prompt has {longest} characters, which cannot fit the model's {limit} tokens: shorten it"
        raise ApiError(400, message, code="context_length_exceeded")
    try:
        if in_thread or sum(lengths) > _ENCODED_IN_PLACE:
            return await asyncio.to_thread(encode)
        return encode()
    except NapkinError as error:
        raise ApiError(400, str(error)) from None


def _submitted(
    service: Service,
    body: SharedFields,
    prompts: list[Prompt],
    *,
    max_tokens: int,
    logprobs: int | None,
    echo: bool = False,
    stop: tuple[str, ...] = (),
    reader: Callable[[], CallReader | None] | None = None,
) -> tuple[CompletionJob, AnswerForm]:
    opened = service.opened
    vocab_size = opened.model.config.vocab_size
    sampling = body.sampling(stop=stop, stop_ids=opened.stop_ids, logprobs=logprobs, vocab_size=vocab_size)
    job = CompletionJob(service, prompts, n=body.n, max_tokens=max_tokens, sampling=sampling, echo=echo, reader=reader)
    return job, AnswerForm(opened.name, opened.tokenizer, isinstance(body, ChatBody), logprobs is not None)


async def _answer(request: Request, body: SharedFields, job: CompletionJob, form: AnswerForm) -> Response:
    if body.stream:
        options = body.stream_options
        return EventStream(job, form, include_usage=options is not None and options.include_usage)
    return await answer_at_once(request.receive, job, form)


def _check_name(service: Service, name: str) -> None:
    if name != service.opened.name:
        message = f"there is no model '{name[:100]}': this server has '{service.opened.name}'"
        raise ApiError(404, message, field="model", code="model_not_found")


def described(service: Service) -> dict[str, object]:
    """A model as /v1/models has it."""
    opened = service.opened
    return {
        "id": opened.name,
        "object": "model",
        "created": service.created,
        "owned_by": "napkin",
        "context_length": opened.model.config.context_length,
        "parameters": opened.n_parameters,
        "kv_bytes_per_token": service.kv_bytes_per_token,
        "has_chat_template": opened.has_chat_template,
        "can_call_tools": can_call_tools(opened),
    }


_READ_AND_DROPPED = 4
"""A client that sends up to this many times too much is read to the end, so that it sees the error; a longer body is
cut off."""
_SMALL = 2**16
"""Bytes of a body that is always received, however much others send."""
_LARGEST_RECEIVED = 16
"""Number of largest bodies that may be in memory while they are received."""


async def _read_content(request: Request, service: Service) -> bytes:
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
