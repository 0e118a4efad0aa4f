"""The fields of requests, their types and their ranges. Everything else is refused with the field's name.

The fields are those of OpenAI's `/v1/completions` and `/v1/chat/completions`, and `top_k`, `min_p`,
`repetition_penalty`, `stop_token_ids` and `ignore_eos`, which other servers have too. Fields that would change the
answer and are not built are accepted only with the value that changes nothing. Errors are OpenAI's: a status, and a
JSON object that says what was wrong.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from starlette.responses import Response

from napkin.chats.call_notations import MOST_NESTED
from napkin.chats.tool_calls import is_nested_deeply
from napkin.errors import NapkinError, first_line, near_names
from napkin.inference.settings import LARGEST_SEED, Sampling

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a JSON body; numbers that are not finite are null."""
    return Response(_encode(value), status, headers=dict(headers or {}), media_type="application/json")


def event(value: Any) -> bytes:
    """A server-sent event. One line of data is enough: line breaks in strings are escaped, and there are no others."""
    return b"data: " + _encode(value) + b"\n\n"


_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """An error for a client: `status` of HTTP, a message of one line, the field that is wrong, a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        # It may quote what a client sent, with line breaks.
        super().__init__(" ".join(message.split()))
        self.status, self.field, self.code = status, field, code
        self.retry_after, self.close = retry_after, close

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}

    def response(self) -> Response:
        """The response; `close` ends the connection, of which the rest is not read."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.close:
            headers["connection"] = "close"
        return json_response(self.body(), self.status, headers)


MOST_CHOICES = 128
MOST_STOPS = 64
LONGEST_STOP = 1000
"""Characters of a stop text: each is looked for at each token."""
MOST_STOP_IDS = 1024
MOST_BIASES = 1024
MOST_LOGPROBS = 100
MOST_TOOLS = 128
"""Functions of a request, and calls in a message."""
_COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` for completions where none is given."""

Body = TypeVar("Body", bound="SharedFields")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted; nothing is added to the pieces."""


class SharedFields(msgspec.Struct, kw_only=True):
    """Fields of both kinds of request."""

    model: str | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Ignored: they describe the client, or request what is the case anyway.
    user: str = ""
    metadata: dict[str, Any] = {}
    store: bool = False
    service_tier: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""

    def check(self) -> None:
        """Raise ApiError for values out of range that `sampling` does not see."""
        _refuse_unless(1 <= self.n <= MOST_CHOICES, "n", f"n is {self.n}: use 1 to {MOST_CHOICES}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            message = f"{name} is {value} and is not supported: use 0, or repetition_penalty"
            _refuse_unless(value == 0, name, message)
        alone = self.stream_options is None or self.stream
        _refuse_unless(alone, "stream_options", "stream_options needs stream to be true")
        longest = max(map(len, self.stops), default=0)
        message = f"stop has a text of {longest} characters: use at most {LONGEST_STOP}"
        _refuse_unless(longest <= LONGEST_STOP, "stop", message)
        for name, given, what, most in (
            ("stop", self.stops, "texts", MOST_STOPS),
            ("stop_token_ids", self.stop_token_ids, "tokens", MOST_STOP_IDS),
            ("logit_bias", self.logit_bias, "tokens", MOST_BIASES),
        ):
            _refuse_unless(len(given) <= most, name, f"{name} has {len(given)} {what}: use at most {most}")

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(
        self, *, stop: Sequence[str], stop_ids: Sequence[int], logprobs: int | None, vocab_size: int
    ) -> Sampling:
        """Return the sampling settings, with the model's `stop` and `stop_ids`. Raises ApiError out of range."""
        seed = secrets.randbelow(LARGEST_SEED) if self.seed is None else self.seed
        try:
            biases = tuple((_token_id(token, vocab_size), bias) for token, bias in self.logit_bias.items())
            wrong = next((token for token in self.stop_token_ids if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise NapkinError(f"stop_token_ids has token id {wrong}: use 0 to {vocab_size - 1}")
            return Sampling(
                temperature=self.temperature,
                top_k=None if self.top_k in (0, -1) else self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                logit_bias=biases,
                stop=(*self.stops, *stop),
                stop_ids=(*(() if self.ignore_eos else stop_ids), *self.stop_token_ids),
                logprobs=logprobs,
                seed=seed,
            )
        except NapkinError as error:
            field = str(error).partition(" ")[0]
            raise ApiError(400, str(error), field=field) from None


class CompletionBody(SharedFields, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int = _COMPLETION_TOKENS
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str = ""

    def check(self) -> None:
        """Raise ApiError for values out of range."""
        super().check()
        _check_count("max_tokens", self.max_tokens)
        fits = self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS
        _refuse_unless(fits, "logprobs", f"logprobs is {self.logprobs}: use 0 to {MOST_LOGPROBS}")
        message = f"best_of is {self.best_of} and is not supported: leave it out, or give n"
        _refuse_unless(self.best_of in (None, self.n), "best_of", message)
        _refuse_unless(not self.suffix, "suffix", "suffix is not supported: leave it out")

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as a text or as ids. Raises ApiError for a list of several kinds."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise ApiError(400, "prompt is an empty list: give a text, token ids, or a list of them", field="prompt")
        ids = [each for each in given if isinstance(each, int)]
        if len(ids) == len(given):
            return [ids]
        texts = [each for each in given if isinstance(each, str)]
        lists = [each for each in given if isinstance(each, list)]
        if len(given) not in (len(texts), len(lists)):
            raise ApiError(400, "prompt mixes texts and token ids: use one kind", field="prompt")
        return [*texts, *lists]


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message."""

    type: str
    text: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A function, and its arguments in JSON."""

    name: str
    arguments: str


class CallBody(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a function in a message of the assistant's."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    """A message."""

    role: str
    content: str | list[TextPart] | None = None
    name: str = ""
    tool_calls: list[CallBody] | None = None
    tool_call_id: str = ""
    refusal: str | None = None
    """Answers have it as null, and clients send them back."""

    @property
    def calls(self) -> list[CallBody]:
        """The calls of functions; none in most messages."""
        return self.tool_calls or []

    def text(self, place: int) -> str:
        """Return its text. Raises ApiError for parts that are not text."""
        if self.content is None:
            _refuse_unless(bool(self.calls), "messages", f"messages[{place}] has no content: give a text")
            return ""
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.type != "text":
                message = f"messages[{place}] has a part of type '{part.type}': this model reads text only"
                raise ApiError(400, message, field="messages")
        return "".join(part.text for part in self.content)


class FunctionBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, forbid_unknown_fields=True):
    """A tool, of the one kind that there is here."""

    type: Literal["function"]
    function: FunctionBody


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """A function by its name."""

    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    """The tool that an answer has to call."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(SharedFields, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[MessageBody]
    tools: list[ToolBody] = []
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: dict[str, Any] = {}
    parallel_tool_calls: bool = True

    def check(self) -> None:
        """Raise ApiError for values out of range."""
        super().check()
        _refuse_unless(bool(self.messages), "messages", "messages is empty: give at least one")
        self._check_tools()
        self._check_turns()
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.top_logprobs is not None:
            _refuse_unless(self.logprobs, "top_logprobs", "top_logprobs needs logprobs to be true")
            fits = 0 <= self.top_logprobs <= MOST_LOGPROBS
            _refuse_unless(fits, "top_logprobs", f"top_logprobs is {self.top_logprobs}: use 0 to {MOST_LOGPROBS}")
        plain = self.response_format.get("type", "text") == "text"
        _refuse_unless(plain, "response_format", "response_format is not supported: use text")

    @property
    def offered(self) -> list[ToolBody]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools

    def _check_tools(self) -> None:
        message = f"tools has {len(self.tools)} functions: use at most {MOST_TOOLS}"
        _refuse_unless(len(self.tools) <= MOST_TOOLS, "tools", message)
        names = [each.function.name for each in self.tools]
        for place, (name, each) in enumerate(zip(names, self.tools, strict=True)):
            shown = f"tools[{place}] has the name '{name[:100]}'"
            message = f"{shown}: use 1 to 64 of letters, digits, '_' and '-'"
            _refuse_unless(re.fullmatch("[A-Za-z0-9_-]{1,64}", name) is not None, "tools", message)
            _refuse_unless(names.index(name) == place, "tools", f"{shown}, as one before it: use each name once")
            message = f"tools[{place}] has strict true, which is not supported: leave it out"
            _refuse_unless(not each.function.strict, "tools", message)
            message = f"tools[{place}] has parameters of more than {MOST_NESTED} levels: use fewer"
            _refuse_unless(not is_nested_deeply(each.function.parameters), "tools", message)
        if self.tool_choice == "required":
            _refuse_unless(
                bool(names), "tool_choice", "tool_choice is required, but there are no tools: give at least one"
            )
        elif isinstance(self.tool_choice, ChosenTool):
            chosen = self.tool_choice.function.name
            message = f"tool_choice names '{chosen[:100]}', which is not among tools: use one of them"
            _refuse_unless(chosen in names, "tool_choice", message)

    def _check_turns(self) -> None:
        """Raise ApiError unless each call of the assistant's is answered before anything else is said."""
        waiting: list[str] = []
        for place, each in enumerate(self.messages):
            where = f"messages[{place}]"
            if each.role == "tool" and each.tool_call_id:
                message = f"{where} answers '{each.tool_call_id[:100]}', which is not a call that waits for an answer"
                _refuse_unless(each.tool_call_id in waiting, "messages", f"{message}: use the call's id")
                waiting.remove(each.tool_call_id)
                continue
            self._refuse_waiting(waiting, f"{where} comes")
            waiting = [call.id for call in each.calls]
            message = f"{where} of role '{each.role[:100]}' has tool_calls: only the assistant calls tools"
            _refuse_unless(not waiting or each.role == "assistant", "messages", message)
            message = f"{where} has {len(waiting)} tool_calls: use at most {MOST_TOOLS}"
            _refuse_unless(len(waiting) <= MOST_TOOLS, "messages", message)
            message = f"{where} has two tool_calls with one id: give each its own"
            _refuse_unless(len({*waiting}) == len(waiting), "messages", message)
        self._refuse_waiting(waiting, "the messages end")

    @staticmethod
    def _refuse_waiting(waiting: Sequence[str], what: str) -> None:
        message = f"{what} before a call was answered: give a message of role tool with"
        _refuse_unless(not waiting, "messages", f"{message} tool_call_id '{''.join(waiting[:1])[:100]}'")


def read_body(content: bytes, kind: type[Body]) -> Body:
    """A request's JSON as its fields, checked; null is as if the field were left out.

    Raises ApiError for malformed JSON, unknown fields, wrong types and values out of range.
    """
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {first_line(error)}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    given = {name: each for name, each in value.items() if each is not None}
    known = kind.__struct_fields__
    for name in given:
        if name not in known:
            near = near_names(name, known)
            way_out = f"did you mean {near[0]}?" if near else "leave it out"
            raise ApiError(400, f"there is no field '{name[:100]}': {way_out}", field=name[:100])
    try:
        body = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        place = re.search(r"`\$\.?([^`.\[]*)", str(error))
        raise ApiError(
            400, f"the request is not valid: {first_line(error)}", field=place[1] if place else None
        ) from None
    body.check()
    return body


def _check_count(name: str, value: int) -> None:
    """Raise ApiError unless a number of tokens is 0 or more, and one that a machine has."""
    _refuse_unless(0 <= value < 2**31, name, f"{name} is {value}: use 0 to {2**31 - 1}")


def _refuse_unless(fits: bool, field: str, message: str) -> None:
    if not fits:
        raise ApiError(400, message, field=field)


def _token_id(text: str, vocab_size: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) >= vocab_size:
        raise NapkinError(f"logit_bias names token '{text[:50]}': use ids from 0 to {vocab_size - 1}")
    return int(text)
