"""Answers to clients: one JSON object at the end, or server-sent events as pieces come. A cut connection ends it."""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from napkin.inference.sampling import Draw
from napkin.serving.completion_job import CompletionJob, NumberedCall, Piece, PlacedToken
from napkin.serving.request_body import DONE, ApiError, event, json_response
from napkin.tokenizer.base import Tokenizer

_WRITTEN_IN_PLACE = 2000
"""Tokens of an answer, with their log-probabilities, beyond which it is written in another thread."""


@dataclass
class AnswerForm:
    """The form of written pieces, in which OpenAI's two interfaces differ."""

    model: str
    tokenizer: Tokenizer
    is_chat: bool
    with_logprobs: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.is_chat else "cmpl-") + secrets.token_hex(12)

    def head(self, *, streamed: bool) -> dict[str, Any]:
        """Return the fields of every object of an answer."""
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """An object of a stream: a piece of one choice."""
        choice: dict[str, Any] = {"index": piece.index}
        if self.is_chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if piece.text:
                delta["content"] = piece.text
            if piece.calls:
                delta["tool_calls"] = [{"index": each.index} | _called(each) for each in piece.calls]
            choice["delta"] = delta
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(piece.tokens)
        choice["finish_reason"] = piece.finish
        return self.head(streamed=True) | {"choices": [choice]}

    def whole(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The choices of an answer that is sent at once."""
        choices: list[dict[str, Any]] = []
        for index in range(1 + max(piece.index for piece in pieces)):
            own = [piece for piece in pieces if piece.index == index]
            text = "".join(piece.text for piece in own)
            choice: dict[str, Any] = {"index": index}
            if self.is_chat:
                calls = [_called(each) for piece in own for each in piece.calls]
                message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
                choice["message"] = message | ({"tool_calls": calls} if calls else {})
            else:
                choice["text"] = text
            choice["logprobs"] = self._logprobs([token for piece in own for token in piece.tokens])
            choices.append(choice | {"finish_reason": own[-1].finish})
        return choices

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        if self.is_chat:
            content = [
                self._described(each.draw.token, each.draw.logprob)
                | {"top_logprobs": [self._described(token, logprob) for token, logprob in each.draw.top]}
                for each in tokens
            ]
            return {"content": content, "refusal": None}
        # For completions four lists with an entry per token.
        scored = [(each.draw, each.draw.logprob) for each in tokens]
        return {
            "tokens": [self._text(each.draw.token) for each in tokens],
            "token_logprobs": [None if logprob is None else _finite(logprob) for _, logprob in scored],
            "top_logprobs": [None if logprob is None else self._likeliest(draw) for draw, logprob in scored],
            "text_offset": [each.offset for each in tokens],
        }

    def _described(self, token: int, logprob: float | None) -> dict[str, Any]:
        content = self._bytes(token)
        text = content.decode(errors="replace")
        return {"token": text, "logprob": None if logprob is None else _finite(logprob), "bytes": list(content)}

    def _likeliest(self, draw: Draw) -> dict[str, float]:
        """The likeliest tokens by their texts, and the drawn one if it is not among them."""
        likeliest: dict[str, float] = {}
        for token, logprob in (*draw.top, (draw.token, draw.logprob or 0.0)):
            # Ids that pad the vocabulary share the same text.
            likeliest.setdefault(self._text(token), _finite(logprob))
        return likeliest

    def _text(self, token: int) -> str:
        r"""A token's text; one that is a part of a character is written as its bytes: `bytes:\xf0\x9f`."""
        content = self._bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _bytes(self, token: int) -> bytes:
        """A token's bytes; none for an id that only fills up the model's vocabulary."""
        return self.tokenizer.vocabulary[token] if token < self.tokenizer.vocab_size else b""


def _called(numbered: NumberedCall) -> dict[str, Any]:
    function = {"name": numbered.call.name, "arguments": numbered.call.arguments_json}
    return {"id": numbered.id, "type": "function", "function": function}


def _finite(value: float) -> float:
    """A log-probability as JSON can have it; OpenAI's servers send -9999 for zero probability."""
    return value if math.isfinite(value) else -9999.0


async def answer_at_once(receive: Receive, job: CompletionJob, form: AnswerForm) -> Response:
    """Wait for all of a job and answer with one object; a client that leaves ends it."""

    async def work() -> list[Piece]:
        return [piece async for pieces in job.pieces() for piece in pieces]

    with job:
        pieces = await unless_disconnected(receive, work())
        if pieces is None:
            # Nobody reads it; 499 is what nginx logs.
            return Response(status_code=499)

        def response() -> Response:
            answer = form.head(streamed=False) | {"choices": form.whole(pieces), "usage": job.usage()}
            return json_response(answer | {"timings": job.timings()})

        # Writing a large answer takes seconds, during which others are served.
        if sum(len(piece.tokens) for piece in pieces) > _WRITTEN_IN_PLACE:
            return await asyncio.to_thread(response)
        return response()


class EventStream(Response):
    """A job's pieces as server-sent events; `on_piece` is called with each."""

    def __init__(
        self,
        job: CompletionJob,
        form: AnswerForm,
        *,
        include_usage: bool,
        on_piece: Callable[[Piece], None] = lambda piece: None,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._job, self._form, self._include_usage, self._on_piece = job, form, include_usage, on_piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the job ends or the client leaves."""
        with self._job:
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for events in self._events():
                # Waits while the client does not read what was sent before.
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        more = {"usage": None} if self._include_usage else {}
        async for pieces in self._job.pieces():
            chunks = []
            for piece in pieces:
                self._on_piece(piece)
                chunks.append(event(self._form.chunk(piece, first=piece.index not in begun) | more))
                begun.add(piece.index)
            yield b"".join(chunks)
        last = b""
        if self._include_usage:
            usage = {"choices": [], "usage": self._job.usage(), "timings": self._job.timings()}
            last = event(self._form.head(streamed=True) | usage)
        yield last + DONE


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """Await `work`; None if the client leaves before, which cancels it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
