"""The routes of OpenAI's interface, and those that watch the server."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from napkin.errors import NapkinError
from napkin.inference.chat_format import Message
from napkin.inference.server.answers import AnswerForm, EventStream, answer_at_once
from napkin.inference.server.api_error import ApiError
from napkin.inference.server.completion_job import CompletionJob, Prompt, check_sequences
from napkin.inference.server.json_response import json_response
from napkin.inference.server.metrics import CONTENT_TYPE
from napkin.inference.server.read_content import read_content
from napkin.inference.server.request_body import Body, ChatBody, CompletionBody, SharedFields, read_body
from napkin.inference.server.service import Service

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
        service, [len(text) for text in texts], lambda: [service.opened.encode(text) for text in texts]
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
    ids = await _encoded(service, [n_characters], lambda: service.opened.chat.encode(messages), in_thread=True)
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if most is None:
        most = max(1, service.opened.model.config.context_length - len(ids))
        if service.limits.max_tokens_per_request is not None:
            most = max(1, min(most, service.limits.max_tokens_per_request // body.n - len(ids)))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    job = _job(
        service, body, [Prompt(ids, len(ids))], max_tokens=most, logprobs=logprobs, stop=service.opened.chat.stop
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
        "parameters": sum(each.numel() for each in opened.model.parameters()),
        "kv_bytes_per_token": service.kv_bytes_per_token,
        "has_chat_template": opened.has_chat_template,
    }
