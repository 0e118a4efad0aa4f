"""The routes of OpenAI's interface, and those that watch the server.

Reading the body of a request: bounded in bytes, and in the time that a client may take.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from napkin.chats.chat_format import Message
from napkin.errors import NapkinError
from napkin.serving.answers import AnswerForm, EventStream, answer_at_once
from napkin.serving.completion_job import CompletionJob, Prompt, check_sequences
from napkin.serving.limits import CONTENT_TYPE
from napkin.serving.request_body import Body, ChatBody, CompletionBody, SharedFields, read_body
from napkin.serving.responses import ApiError, json_response
from napkin.serving.service import REQUEST_DUE, Service

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


_PARSED_IN_PLACE = 2**18
"""Bytes of JSON that are soon read; more are read in another thread."""
_Encoded = TypeVar("_Encoded")
_ENCODED_IN_PLACE = 20_000
"""Characters that are turned into tokens in less than a step of the engine takes; more go to another thread."""


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    service = service_of(request)
    body = await _body(request, service, CompletionBody)
    _check_model(service, body)
    given = body.prompts()
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    check_sequences(service.limits, len(given), body.n)
    encoded = await _encoded(
        service, [len(text) for text in texts], lambda: [service.opened.encode_prompt(text) for text in texts]
    )
    prompts = [Prompt(ids, len(service.opened.start_ids)) for ids in encoded]
    prompts += [Prompt(prompt) for prompt in given if not isinstance(prompt, str)]
    job = _job(service, body, prompts, max_tokens=body.max_tokens, logprobs=body.logprobs, echo=body.echo)
    return await _answer(request, service, body, job, with_logprobs=body.logprobs is not None)


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    service = service_of(request)
    body = await _body(request, service, ChatBody)
    _check_model(service, body)
    messages = [Message(each.role, each.text(place)) for place, each in enumerate(body.messages)]
    # Each message takes a token at least, whatever it says.
    n_characters = sum(max(service.longest_token, len(each.role) + len(each.content)) for each in messages)
    # A template is rendered by another process, which is waited for in a thread.
    ids = await _encoded(service, [n_characters], lambda: service.opened.chat_format.encode(messages), in_thread=True)
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if most is None:
        most = max(1, service.opened.model.config.context_length - len(ids))
        if service.limits.max_tokens_per_request is not None:
            most = max(1, min(most, service.limits.max_tokens_per_request // body.n - len(ids)))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    job = _job(
        service, body, [Prompt(ids, len(ids))], max_tokens=most, logprobs=logprobs, stop=service.opened.chat_format.stop
    )
    return await _answer(request, service, body, job, with_logprobs=body.logprobs)


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [_described(service_of(request))]})


async def one_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    service = service_of(request)
    _check_name(service, request.path_params["name"])
    return json_response(_described(service))


async def health(request: Request) -> Response:
    """GET /health: 200 while requests are taken."""
    service = service_of(request)
    if service.thread.failure is not None:
        return json_response({"status": "failed"}, 503)
    if service.draining:
        return json_response({"status": "draining"}, 503)
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    return PlainTextResponse(service_of(request).metrics_text(), headers={"content-type": CONTENT_TYPE})


def service_of(request: Request) -> Service:
    """The service that the application was made for."""
    return request.app.state.service


async def _body(request: Request, service: Service, kind: type[Body]) -> Body:
    content = await read_content(request, service)
    if len(content) > _PARSED_IN_PLACE:
        return await asyncio.to_thread(read_body, content, kind)
    return read_body(content, kind)


async def _encoded(
    service: Service, lengths: Sequence[int], encode: Callable[[], _Encoded], *, in_thread: bool = False
) -> _Encoded:
    """What texts of so many characters are as tokens. Raises ApiError for what cannot be encoded or is too long for a
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


def _job(
    service: Service,
    body: SharedFields,
    prompts: list[Prompt],
    *,
    max_tokens: int,
    logprobs: int | None,
    echo: bool = False,
    stop: tuple[str, ...] = (),
) -> CompletionJob:
    opened = service.opened
    vocab_size = opened.model.config.vocab_size
    sampling = body.sampling(stop=stop, stop_ids=opened.stop_ids, logprobs=logprobs, vocab_size=vocab_size)
    return CompletionJob(service, prompts, n=body.n, max_tokens=max_tokens, sampling=sampling, echo=echo)


async def _answer(
    request: Request, service: Service, body: SharedFields, job: CompletionJob, *, with_logprobs: bool
) -> Response:
    is_chat = isinstance(body, ChatBody)
    form = AnswerForm(service.opened.name, service.opened.tokenizer, is_chat, with_logprobs)
    if body.stream:
        options = body.stream_options
        return EventStream(job, form, include_usage=options is not None and options.include_usage)
    return await answer_at_once(request.receive, job, form)


def _check_model(service: Service, body: SharedFields) -> None:
    if body.model is not None:
        _check_name(service, body.model)


def _check_name(service: Service, name: str) -> None:
    if name != service.opened.name:
        message = f"there is no model '{name[:100]}': this server has '{service.opened.name}'"
        raise ApiError(404, message, field="model", code="model_not_found")


def _described(service: Service) -> dict[str, object]:
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
    }
