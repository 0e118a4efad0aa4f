"""One request of a client: its sequences in the engine, and the new tokens of each as they are generated."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from napkin.chats.tool_calls import CallReader, FunctionCall
from napkin.errors import NapkinError
from napkin.inference.generation import TextStream
from napkin.inference.requests import Completion, Request
from napkin.inference.sampling import Draw
from napkin.inference.settings import LARGEST_SEED, Sampling
from napkin.serving.limits import Limits
from napkin.serving.request_body import ApiError
from napkin.serving.service import Service, token_seconds
from napkin.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class PlacedToken:
    """A token of a text: what was drawn, and the place of its first character in the text."""

    draw: Draw
    offset: int


class GrowingText:
    """Text in pieces as tokens are generated; it ends before a stop text, and pieces contain whole characters only. A
    token is reported with the piece that contains its first character, so that the tokens of all pieces are those of
    the whole text. Tokens within the stop text are not reported.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, offset: int = 0, at_start: bool = False) -> None:
        self.stopped = False
        self.length = offset
        """Characters released so far, those before the completion included."""
        self._stream = TextStream(tokenizer, stop, at_start=at_start)
        # A second stream without stop texts knows at which character a token begins while its text is held back.
        self._plain = TextStream(tokenizer, at_start=at_start) if stop else None
        self._seen = offset
        self._waiting: list[PlacedToken] = []

    def push(self, draw: Draw) -> tuple[str, list[PlacedToken]]:
        """The text that is certain after one more token, and the tokens that begin in it."""
        self._waiting.append(PlacedToken(draw, self._seen))
        piece = self._stream.push(draw.token)
        self._seen += len(piece if self._plain is None else self._plain.push(draw.token))
        self.stopped = self._stream.stopped
        return self._released(piece)

    def finish(self) -> tuple[str, list[PlacedToken]]:
        """The rest, where no more tokens come."""
        piece, tokens = self._released(self._stream.finish())
        self.stopped = self._stream.stopped
        if not self.stopped:
            tokens, self._waiting = [*tokens, *self._waiting], []
        return piece, tokens

    def _released(self, piece: str) -> tuple[str, list[PlacedToken]]:
        self.length += len(piece)
        n_released = sum(each.offset < self.length for each in self._waiting)
        released, self._waiting = self._waiting[:n_released], self._waiting[n_released:]
        return piece, released


def placed_prompt(draws: Sequence[Draw], tokenizer: Tokenizer) -> list[PlacedToken]:
    """The tokens of a prompt, each with its place in the prompt's text."""
    stream, offset, placed = TextStream(tokenizer, at_start=True), 0, []
    for draw in draws:
        placed.append(PlacedToken(draw, offset))
        offset += len(stream.push(draw.token))
    return placed


_FULL_ANSWERS = 4
"""The most answers in flight, counted with the largest number of log-probabilities that one may have."""


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt."""

    ids: Sequence[int]
    n_hidden: int = 0
    """Number of tokens at its beginning that the client did not send, and that are not echoed."""


@dataclass(frozen=True)
class NumberedCall:
    """A call of a function within a choice."""

    index: int
    id: str
    call: FunctionCall


@dataclass(frozen=True)
class Piece:
    """The new text, tokens and calls of a choice."""

    index: int
    text: str
    tokens: Sequence[PlacedToken]
    finish: str | None
    calls: Sequence[NumberedCall] = ()


@dataclass
class _Choice:
    """A sequence of a request, and how much of it has been read."""

    index: int
    completion: Completion
    prompt: Prompt
    text: GrowingText
    echoed: str
    """Text of the prompt that comes before the completion."""
    reader: CallReader | None = None
    """Finds calls in the text; None where there can be none."""
    begun: bool = False
    finish: str | None = None
    n_read: int = 0


class CompletionJob:
    """The sequences of one request: prompt i's choice j has number i·n + j, and seed + j.

    Made once the engine has accepted all of them. Use it as a context manager: unfinished sequences are cancelled at
    the end of the block.
    """

    def __init__(
        self,
        service: Service,
        prompts: Sequence[Prompt],
        *,
        n: int,
        max_tokens: int,
        sampling: Sampling,
        echo: bool = False,
        reader: Callable[[], CallReader | None] | None = None,
    ) -> None:
        """`reader` makes what finds calls in the text of a choice. Raises ApiError for what the limits or the model do
        not allow."""
        self._service, self._changed = service, asyncio.Event()
        self._n_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._wants_prompt_logprobs = echo and sampling.logprobs is not None
        self._deadline = asyncio.get_running_loop().time() + service.limits.request_seconds
        # Log-probabilities that the answer may have.
        n_scored = sum(max_tokens + (len(prompt.ids) if echo else 0) for prompt in prompts) * n
        self._n_logprobs = 0 if sampling.logprobs is None else n_scored * (sampling.logprobs + 1)
        _check_limits(service, prompts, n, max_tokens, self._n_logprobs)
        stop, sampling = sampling.stop, replace(sampling, stop=())
        try:
            requests = [
                Request(
                    prompt=tuple(prompt.ids),
                    max_new_tokens=max_tokens,
                    sampling=replace(sampling, seed=(sampling.seed + number) % (LARGEST_SEED + 1)),
                    prompt_logprobs=self._wants_prompt_logprobs,
                )
                for prompt in prompts
                for number in range(n)
            ]
            self._completions = service.thread.submit(requests, self._changed)
        except NapkinError as error:
            longest = max(len(prompt.ids) for prompt in prompts) + max_tokens
            too_long = longest > service.opened.model.config.context_length
            raise ApiError(400, str(error), code="context_length_exceeded" if too_long else None) from None
        echoes = [self._echoed(prompt) if echo else "" for prompt in prompts]
        self._choices: list[_Choice] = []
        for number, completion in enumerate(self._completions):
            prompt, echoed = prompts[number // n], echoes[number // n]
            at_start = prompt.n_hidden == len(prompt.ids)
            text = GrowingText(service.opened.tokenizer, stop, offset=len(echoed), at_start=at_start)
            calls = None if reader is None else reader()
            self._choices.append(_Choice(number, completion, prompt, text, echoed, calls))

    def __enter__(self) -> "CompletionJob":
        self._service.n_logprobs += self._n_logprobs
        return self

    def __exit__(self, *_: object) -> None:
        self._service.n_logprobs -= self._n_logprobs
        for choice in self._choices:
            if choice.finish is None:
                self._service.meters.ended(choice.completion, "cancelled")
        self._service.thread.release(self._completions)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yield new pieces of all choices until they have ended.

        Raises ApiError where the request takes longer than its limit, or a sequence of it fails.
        """
        while any(choice.finish is None for choice in self._choices):
            failure = next((each.failure for each in self._completions if each.failure is not None), None)
            if failure is not None:
                self._end_all("error")
                raise ApiError(500, f"the model failed: {failure}")
            # A client that reads slowly finds something new each time.
            if asyncio.get_running_loop().time() > self._deadline:
                raise self._late()
            new = [piece for choice in self._choices for piece in self._new(choice)]
            if new:
                yield new
                continue
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise self._late() from None
            self._changed.clear()

    def usage(self) -> dict[str, object]:
        """Tokens, as OpenAI's interface counts them."""
        n_drawn, n_prompt = sum(choice.n_read for choice in self._choices), self._n_prompt_tokens
        cached = sum(choice.completion.cached_tokens for choice in self._choices)
        speculations = [choice.completion.speculation for choice in self._choices]
        accepted, proposed = (sum(getattr(each, of) for each in speculations) for of in ("accepted", "proposed"))
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_drawn,
            "total_tokens": n_prompt + n_drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": proposed - accepted,
            },
        }

    def timings(self) -> dict[str, float | None]:
        """Seconds of the first choice: to its first token, and per token after it."""
        first, per_token = token_seconds(self._completions[0], time.perf_counter())
        return {"seconds_to_first_token": first, "seconds_per_token": per_token}

    def _late(self) -> ApiError:
        self._end_all("timeout")
        limit = self._service.limits.request_seconds
        return ApiError(504, f"the request took longer than {limit:g} s: ask for fewer tokens")

    def _end_all(self, outcome: str) -> None:
        for choice in self._choices:
            if choice.finish is None:
                choice.finish = outcome
                self._service.meters.ended(choice.completion, outcome)

    def _new(self, choice: _Choice) -> list[Piece]:
        """Return the new part of a choice, as one piece or none."""
        if choice.finish is not None:
            return []
        completion = choice.completion
        # Read before the draws: the engine adds draws first, so none is missed.
        ended = completion.finish
        new = completion.draws[choice.n_read :]
        if not (new or ended):
            return []
        pieces = [] if choice.begun else [self._beginning(choice)]
        choice.begun = True
        for draw in new:
            choice.n_read += 1
            pieces.append(choice.text.push(draw))
            if choice.text.stopped:
                break
        if not choice.text.stopped and ended is not None:
            pieces.append(choice.text.finish())
        text, tokens = "".join(text for text, _ in pieces), [token for _, placed in pieces for token in placed]
        is_whole = choice.text.stopped or ended is not None
        text, calls = _divided(choice.reader, text, is_whole=is_whole)
        if choice.text.stopped or (choice.reader is not None and choice.reader.ended):
            choice.finish = "stop"
        elif ended is not None:
            choice.finish = "stop" if ended == "cancelled" else ended
        if choice.finish is not None:
            self._service.meters.ended(completion, choice.finish)
            if completion.finish is None:
                self._service.thread.release([completion])
            if choice.finish == "stop" and choice.reader is not None and choice.reader.n_calls:
                choice.finish = "tool_calls"
        # While a call is being written, its tokens are told only for their log-probabilities.
        is_new = text or calls or choice.finish or (tokens and (choice.reader is None or self._n_logprobs))
        return [Piece(choice.index, text, tokens, choice.finish, calls)] if is_new else []

    def _beginning(self, choice: _Choice) -> tuple[str, list[PlacedToken]]:
        """The echoed prompt with its tokens."""
        if not self._wants_prompt_logprobs:
            return choice.echoed, []
        n_hidden, ids = choice.prompt.n_hidden, choice.prompt.ids
        draws = [draw or Draw(token) for draw, token in zip(choice.completion.prompt_draws, ids, strict=True)]
        return choice.echoed, placed_prompt(draws[n_hidden:], self._service.opened.tokenizer)

    def _echoed(self, prompt: Prompt) -> str:
        stream = TextStream(self._service.opened.tokenizer, at_start=True)
        pieces = [stream.push(token) for token in prompt.ids[prompt.n_hidden :]]
        return "".join(pieces) + stream.finish()


def _divided(reader: CallReader | None, text: str, *, is_whole: bool) -> tuple[str, list[NumberedCall]]:
    """The text without the calls in it, and those; `is_whole` where no more comes."""
    if reader is None:
        return text, []
    first = reader.n_calls
    said, calls = reader.push(text)
    if is_whole and not reader.ended:
        rest, more = reader.finish()
        said, calls = said + rest, calls + more
    return said, [NumberedCall(first + i, call.id or reader.form.new_id(), call) for i, call in enumerate(calls)]


def check_sequences(limits: Limits, n_prompts: int, n: int) -> None:
    """Raise ApiError for more sequences than a server ever has in flight."""
    if n_prompts * n > limits.max_requests:
        message = f"the request has {n_prompts * n} sequences: use at most {limits.max_requests}"
        raise ApiError(400, message, field="n" if n_prompts == 1 else "prompt")


def _check_limits(service: Service, prompts: Sequence[Prompt], n: int, max_tokens: int, n_logprobs: int) -> None:
    limits, vocab_size = service.limits, service.opened.model.config.vocab_size
    for prompt in prompts:
        wrong = next((token for token in prompt.ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"prompt has token id {wrong}: use 0 to {vocab_size - 1}", field="prompt")
    n_sequences = len(prompts) * n
    check_sequences(limits, len(prompts), n)
    n_tokens = sum(len(prompt.ids) + max_tokens for prompt in prompts) * n
    if limits.max_tokens_per_request is not None and n_tokens > limits.max_tokens_per_request:
        message = f"the request takes up to {n_tokens} tokens: use at most {limits.max_tokens_per_request}"
        raise ApiError(400, message, field="max_tokens")
    if n_logprobs > service.most_logprobs:
        message = (
            f"the answer has up to {n_logprobs} log-probabilities: ask for fewer, for at most {service.most_logprobs}"
        )
        raise ApiError(400, message, field="logprobs")
    if service.n_logprobs + n_logprobs > _FULL_ANSWERS * service.most_logprobs:
        message = f"answers in flight have up to {service.n_logprobs} log-probabilities: try again later"
        raise ApiError(429, message, code="rate_limit_exceeded", retry_after=1)
    if service.thread.in_flight + n_sequences > limits.max_requests:
        message = (
            f"{service.thread.in_flight} sequences are in flight of at most {limits.max_requests}: try again later"
        )
        raise ApiError(429, message, code="rate_limit_exceeded", retry_after=1)
