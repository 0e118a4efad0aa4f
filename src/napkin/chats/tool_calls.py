"""Calls of functions in what a model writes: found while an answer grows, and written back into a conversation.

How a call is written is the chat template's choice:

| form | a call | templates |
|---|---|---|
| `HERMES` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them | Hermes, Qwen 2.5 and 3 |
| `LLAMA` | an answer that is `{"name": ..., "parameters": {...}}` and nothing else | Llama 3.1 to 3.3 |
| `MISTRAL` | `[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]` | Mistral up to Small 3.1 |
| `MISTRAL_ARGS` | `[TOOL_CALLS]NAME[ARGS]{...}`, any number of them | Mistral since Small 3.2 |
| `DEEPSEEK` | `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, then JSON in Markdown | DeepSeek V3 and R1 |
| `DEEPSEEK_31` | `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` | DeepSeek V3.1 |
| `HARMONY` | `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}` | gpt-oss |
| `FUNCTION_GEMMA` | `<start_function_call>call:NAME{city:<escape>Rome<escape>}<end_function_call>` | FunctionGemma |
| `GEMMA_4` | `<|tool_call>call:NAME{city:<|"|>Rome<|"|>}<tool_call|>` | Gemma 4 |
| `GEMMA` | an answer that is `[NAME(city="Rome")]`, a block `tool_code`, or as `LLAMA` and `OWN` | Gemma 3 |
| `OWN` | `<NAME>text</NAME>` for a function of one text, or the form of Hermes | those that say nothing of calls |

What a model writes is data: a call that is malformed, or of a function that was not offered, stays text.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from napkin.chats.call_blocks import Block, ChannelMessages, Divider, MarkedJson, Tag, TaggedText, WholeAnswer
from napkin.chats.call_notations import MOST_NESTED, as_gemma, as_python, gemma_call, gemma_notation, python_calls
from napkin.errors import NapkinError, first_line


@dataclass(frozen=True)
class Function:
    """A function that a model may call."""

    name: str
    text_argument: str | None = None
    """The name of its argument if it has one, which is a text."""

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "Function":
        """The function of a schema in OpenAI's form, `{"type": "function", "function": {"name": ..., ...}}`."""
        function = schema["function"]
        properties = function.get("parameters", {}).get("properties")
        if isinstance(properties, Mapping) and len(properties) == 1:
            ((name, value),) = properties.items()
            if isinstance(value, Mapping) and value.get("type") == "string":
                return cls(function["name"], name)
        return cls(function["name"])


@dataclass(frozen=True)
class FunctionCall:
    """A call, with arguments that JSON can hold."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    """What the model calls it; None in forms without ids."""

    @property
    def arguments_json(self) -> str:
        """The arguments as chat templates write them."""
        return json.dumps(self.arguments, ensure_ascii=False)


def read_call(text: str, names: Iterable[str], field: str = "arguments") -> tuple[str, Any]:
    """The function that a JSON object names, and the value of its `field`, None if it has none.

    Raises NapkinError for what is not JSON, and for a function that is not among `names`.
    """
    decoded = _json(text)
    name, value = (decoded.get("name"), decoded.get(field)) if isinstance(decoded, dict) else (None, None)
    return _offered(name, names), value


def _offered(name: Any, names: Iterable[str]) -> str:
    """The name of a function that was offered."""
    if not isinstance(name, str) or name not in names:
        raise NapkinError(f"there is no such tool: use {', '.join(names)}")
    return name


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise NapkinError(f"the call is not JSON: {first_line(error)}") from None


def is_nested_deeply(value: Any) -> bool:
    """True for lists and objects in more than MOST_NESTED levels."""
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True


TOOL_CALL = "tool_call"
"""The name of the tag of calls in JSON."""
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_SEPARATOR = "<｜tool▁sep｜>"
_CODE = Tag("tool_code", "```tool_code\n", "\n```")
Functions = Mapping[str, Function]


@dataclass(frozen=True)
class CallForm:
    """How calls are written."""

    divide: Callable[[Functions], Divider]
    """Makes what finds the blocks of an answer that may be calls."""
    read: Callable[[Block, Functions], list[FunctionCall]]
    """The calls of a block; none for a mark that only stands around calls. Raises NapkinError for anything else."""
    write_all: Callable[[Sequence[FunctionCall]], str]
    """Calls as the model would have written them."""
    begin: Callable[[str | None], str]
    """The text that a call of a function begins with; None is any function."""
    marks: tuple[str, ...] = ()
    """Texts of `begin` that are single tokens where the tokenizer has such."""
    by_name: bool = False
    """A call of a function of one text may be that text between tags of the function's name."""
    id_length: int | None = None
    """Letters and digits that templates want ids to have."""
    is_single: bool = False
    """A call ends the answer."""
    ends: str = ""
    """A mark that ends an answer with calls, behind which the model would write what the functions return."""
    takes_json: bool = False
    """Templates want arguments as JSON, and not as an object."""

    def write(self, calls: Sequence[FunctionCall], functions: Functions) -> str:
        """Calls as the model would have written them."""
        by_name = [_by_name(each, functions.get(each.name)) if self.by_name else None for each in calls]
        written = [text or self.write_all([call]) for text, call in zip(by_name, calls, strict=True)]
        return "\n".join(written) if any(by_name) else self.write_all(calls)

    def beginning(self, function: Function | None) -> str:
        """The text that a call of a function begins with; None is any function."""
        if function is not None and self.is_by_name(function):
            return f"<{function.name}>"
        return self.begin(None if function is None else function.name)

    def is_by_name(self, function: Function) -> bool:
        """True where a call of a function is its one text between tags of its name."""
        return self.by_name and function.text_argument is not None

    def new_id(self) -> str:
        """An id for a call that has none."""
        return f"call_{secrets.token_hex(12)}" if self.id_length is None else secrets.token_hex(16)[: self.id_length]


def _by_name(call: FunctionCall, function: Function | None) -> str | None:
    text = call.arguments.get((function and function.text_argument) or "")
    return f"<{call.name}>{text}</{call.name}>" if isinstance(text, str) and len(call.arguments) == 1 else None


def _call(name: str, arguments: Any, functions: Functions, id: Any = None) -> FunctionCall:
    """A call, checked."""
    _offered(name, functions)
    if not isinstance(arguments, dict) or is_nested_deeply(arguments):
        raise NapkinError(f"arguments are not an object of at most {MOST_NESTED} levels")
    is_id = isinstance(id, str) and re.fullmatch("[A-Za-z0-9_-]{1,64}", id) is not None
    return FunctionCall(name, arguments, id if is_id else None)


def _begun_json(name: str | None, field: str) -> str:
    return '{"name":' if name is None else f'{{"name": {json.dumps(name)}, "{field}":'


def _json_objects(calls: Sequence[FunctionCall], field: str, before: str = "", behind: str = "") -> str:
    return "\n".join(f"{before}{_begun_json(each.name, field)} {each.arguments_json}}}{behind}" for each in calls)


def _tagged(functions: Functions, tags: Sequence[Tag], *, by_name: bool = False) -> TaggedText:
    named = [each.name for each in functions.values() if each.text_argument is not None] if by_name else []
    return TaggedText([*tags, *map(Tag.named, named)])


def _read_tagged(block: Block, functions: Functions) -> list[FunctionCall]:
    """A call in the form of Hermes, or a text by the name of its function."""
    argument = functions[block.name].text_argument if block.name in functions else None
    if block.name != TOOL_CALL and argument is not None:
        return [FunctionCall(block.name, {argument: block.content.strip("\n")})]
    return [_call(*read_call(block.content, functions), functions)]


HERMES = CallForm(
    divide=lambda functions: _tagged(functions, [Tag.named(TOOL_CALL)]),
    read=_read_tagged,
    write_all=lambda calls: _json_objects(calls, "arguments", f"<{TOOL_CALL}>\n", f"\n</{TOOL_CALL}>"),
    begin=lambda name: f"<{TOOL_CALL}>\n{_begun_json(name, 'arguments')}",
    marks=(f"<{TOOL_CALL}>",),
)
OWN = replace(HERMES, divide=lambda functions: _tagged(functions, [Tag.named(TOOL_CALL)], by_name=True), by_name=True)


def _may_be_json(begins: str) -> bool | None:
    """True for an answer that begins as an object of JSON, behind Llama's tag or without it."""
    begun = begins.removeprefix(_PYTHON_TAG).lstrip()
    return begun.startswith("{") or (None if not begun or _PYTHON_TAG.startswith(begun) else False)


def _read_bare(block: Block, functions: Functions) -> list[FunctionCall]:
    text = block.content.strip().removeprefix(_PYTHON_TAG)
    return [_call(*read_call(text, functions, "parameters"), functions)]


LLAMA = CallForm(
    divide=lambda functions: WholeAnswer(_may_be_json, TaggedText([])),
    read=_read_bare,
    write_all=lambda calls: _json_objects(calls, "parameters"),
    begin=lambda name: _begun_json(name, "parameters"),
)


# A list or an object behind `[TOOL_CALLS]`, or a name, an id and an object, where versions leave out this or that.
_MISTRAL_HEAD = re.compile(r"\s*(?:([\w.-]+)(?:\[CALL_ID\]([\w-]*))?(?:\[ARGS\]\s*)?(?=\{)|(?=[\[{]))")
_MISTRAL_HEAD_BEGUN = re.compile(r"\s*(?:[\w.-]+(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\]\s*|\[?A?R?G?S?|\[?C?A?L?L?_?I?D?))?")


def _mistral_head_length(text: str) -> int | None:
    found = _MISTRAL_HEAD.match(text)
    if found is not None:
        return found.end()
    return None if _MISTRAL_HEAD_BEGUN.fullmatch(text) else -1


def _read_mistral(block: Block, functions: Functions) -> list[FunctionCall]:
    head = _MISTRAL_HEAD.match(block.content)
    name, call_id, begin = (head[1], head[2], head.end()) if head else (None, None, 0)
    decoded = _json(block.content[begin:])
    if name:
        return [_call(name, decoded, functions, call_id)]
    listed = decoded if isinstance(decoded, list) else [decoded]
    if not listed or not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in listed):
        raise NapkinError("the list of calls has something else in it")
    return [_call(each["name"], each.get("arguments"), functions, each.get("id")) for each in listed]


def _mistral_list(calls: Sequence[FunctionCall]) -> str:
    ids = ["" if each.id is None else f', "id": {json.dumps(each.id)}' for each in calls]
    listed = [
        f"{_begun_json(each.name, 'arguments')} {each.arguments_json}{id}}}"
        for each, id in zip(calls, ids, strict=True)
    ]
    return f"{_TOOL_CALLS} [{', '.join(listed)}]"


MISTRAL = CallForm(
    divide=lambda functions: MarkedJson(_TOOL_CALLS, _mistral_head_length),
    read=_read_mistral,
    write_all=_mistral_list,
    begin=lambda name: f"{_TOOL_CALLS} [{_begun_json(name, 'arguments')}",
    marks=(_TOOL_CALLS, _ARGS),
    id_length=9,
)
MISTRAL_ARGS = replace(
    MISTRAL,
    write_all=lambda calls: "".join(f"{_TOOL_CALLS}{each.name}{_ARGS}{each.arguments_json}" for each in calls),
    begin=lambda name: _TOOL_CALLS if name is None else f"{_TOOL_CALLS}{name}{_ARGS}",
)

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_TAGS = (Tag("", _CALLS_BEGIN, ""), Tag("", _CALLS_END, ""), Tag("call", _CALL_BEGIN, _CALL_END))
_JSON_BEGIN, _JSON_END = "\n```json\n", "\n```"


def _read_deepseek(block: Block, functions: Functions) -> list[FunctionCall]:
    if not block.name:
        return []
    name, _, arguments = block.content.partition(_SEPARATOR)
    if not arguments.lstrip().startswith("{"):
        name, _, arguments = arguments.partition(_JSON_BEGIN)
        arguments = arguments.rstrip().removesuffix(_JSON_END)
    return [_call(name.strip(), _json(arguments), functions)]


def _deepseek(calls: Sequence[FunctionCall], before: str, between: str, behind: str, joint: str) -> str:
    written = [f"{_CALL_BEGIN}{before}{each.name}{between}{each.arguments_json}{behind}{_CALL_END}" for each in calls]
    return f"{_CALLS_BEGIN}{joint.join(written)}{_CALLS_END}"


DEEPSEEK = CallForm(
    divide=lambda functions: TaggedText(_DEEPSEEK_TAGS),
    read=_read_deepseek,
    write_all=lambda calls: _deepseek(calls, f"function{_SEPARATOR}", _JSON_BEGIN, _JSON_END, "\n"),
    begin=lambda name: (
        f"{_CALLS_BEGIN}{_CALL_BEGIN}function{_SEPARATOR}" + ("" if name is None else f"{name}{_JSON_BEGIN}")
    ),
    marks=(_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR),
    takes_json=True,
)
DEEPSEEK_31 = replace(
    DEEPSEEK,
    write_all=lambda calls: _deepseek(calls, "", _SEPARATOR, "", ""),
    begin=lambda name: f"{_CALLS_BEGIN}{_CALL_BEGIN}" + ("" if name is None else f"{name}{_SEPARATOR}"),
)

_CHANNEL, _CONSTRAIN, _MESSAGE, _CALLED = "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"


def _harmony_begin(name: str | None) -> str:
    begun = f"{_CHANNEL}commentary to=functions."
    return begun if name is None else f"{begun}{name} {_CONSTRAIN}json{_MESSAGE}"


HARMONY = CallForm(
    divide=lambda functions: ChannelMessages(),
    read=lambda block, functions: [_call(block.name, _json(block.content), functions)],
    write_all=lambda calls: "<|start|>assistant".join(
        f"{_harmony_begin(each.name)}{each.arguments_json}{_CALLED}" for each in calls
    ),
    begin=_harmony_begin,
    marks=(_CHANNEL, _CONSTRAIN, _MESSAGE),
    is_single=True,
)


def _gemma_function_form(opens: str, closes: str, mark: str, behind: str) -> CallForm:
    """The form of Gemma's models for functions: `opens` and `closes` around a call, `mark` around texts; answers end
    by `behind`."""
    notation = gemma_notation(mark)
    return CallForm(
        divide=lambda functions: TaggedText([Tag("call", opens, closes), Tag("", behind, "")]),
        read=lambda block, functions: [_call(*gemma_call(block.content, notation), functions)] if block.name else [],
        write_all=lambda calls: "".join(
            f"{opens}call:{each.name}{as_gemma(each.arguments, mark)}{closes}" for each in calls
        ),
        begin=lambda name: f"{opens}call:" + ("" if name is None else f"{name}{{"),
        marks=(opens,),
        ends=behind,
    )


FUNCTION_GEMMA = _gemma_function_form(
    "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"
)
GEMMA_4 = _gemma_function_form("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


def _gemma_divider(functions: Functions) -> Divider:
    begins = [f"[{name}(" for name in functions]

    def may_be(text: str) -> bool | None:
        compact = "".join(text[:200].split())
        if text.startswith("{") or any(compact.startswith(each) for each in begins):
            return True
        return None if any(each.startswith(compact) for each in begins) else False

    return WholeAnswer(may_be, _tagged(functions, [_CODE, Tag.named(TOOL_CALL)], by_name=True))


def _read_gemma(block: Block, functions: Functions) -> list[FunctionCall]:
    if block.name not in ("", _CODE.name):
        return _read_tagged(block, functions)
    if not block.name and block.content.lstrip().startswith("{"):
        return _read_bare(block, functions)
    return [_call(name, arguments, functions) for name, arguments in python_calls(block.content)]


GEMMA = CallForm(
    divide=_gemma_divider,
    read=_read_gemma,
    write_all=lambda calls: f"[{', '.join(as_python(each.name, each.arguments) for each in calls)}]",
    begin=lambda name: "[" if name is None else f"[{name}(",
)

_FORMS: tuple[tuple[CallForm | None, tuple[str, ...], tuple[str, ...]], ...] = (
    (HERMES, (f"<{TOOL_CALL}>",), ("<function=", "<arg_key>")),
    (GEMMA, ("[func_name1(",), ()),
    (LLAMA, ("ipython", '"parameters": '), ()),
    (MISTRAL_ARGS, (_TOOL_CALLS, _ARGS), ()),
    (MISTRAL, (_TOOL_CALLS,), ()),
    (DEEPSEEK, (_CALL_BEGIN, "```json"), ()),
    (DEEPSEEK_31, (_CALL_BEGIN,), ()),
    (HARMONY, (_CHANNEL, "functions."), ()),
    (FUNCTION_GEMMA, FUNCTION_GEMMA.marks, ()),
    (GEMMA_4, GEMMA_4.marks, ()),
    (None, ("tool_calls",), ()),
    (GEMMA, ("<start_of_turn>",), ()),
    (OWN, (), ()),
)
"""Forms, with texts that a template of each has, and texts that it has not; the first that fits is taken."""


def call_form(template: str) -> CallForm | None:
    """The form in which a chat template writes calls; None for one that is not known here."""
    return next(
        form
        for form, present, absent in _FORMS
        if all(each in template for each in present) and not any(each in template for each in absent)
    )


class CallReader:
    """Divides an answer, as it grows, into its text and the calls in it.

    White space before a call is left out, and so is what stands behind the last one. `most` calls end the answer, as a
    stop text would, and so does the form's own mark behind calls: `ended` is True.
    """

    def __init__(self, form: CallForm, functions: Sequence[Function], *, most: int | None = None) -> None:
        self.form, self._functions = form, {each.name: each for each in functions}
        self._divider = form.divide(self._functions)
        # White space and marks around calls, which are text unless they are beside a call.
        self._space: list[str] = []
        self._is_behind_call = False
        self._most = most
        self._is_over = False
        self._ids: set[str] = set()
        self.n_calls = 0

    @property
    def ended(self) -> bool:
        return self._is_over or (self._most is not None and self.n_calls >= self._most)

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        """The text and the calls that are certain after more of the answer."""
        return self._told(self._divider.push(text))

    def finish(self) -> tuple[str, list[FunctionCall]]:
        """The rest, where no more of the answer comes."""
        text, calls = self._told(self._divider.finish())
        return (text if self.n_calls else text + "".join(self._space)), calls

    def _told(self, parts: Iterable[str | Block]) -> tuple[str, list[FunctionCall]]:
        said, calls = list[str](), list[FunctionCall]()
        for part in parts:
            found = self._calls(part) if isinstance(part, Block) else None
            if found is None:
                self._say(str(part), said)
            elif found:
                calls += found
                self._space, self._is_behind_call = [], True
            elif self.n_calls and str(part) == self.form.ends:
                self._is_over = True
            elif not self._is_behind_call:
                self._space.append(str(part))
            if self.ended:
                break
        return "".join(said), calls

    def _calls(self, block: Block) -> list[FunctionCall] | None:
        """The calls of a block, as many as the answer may have; None if it is text."""
        try:
            found = self.form.read(block, self._functions)
        except NapkinError:
            return None
        calls = found if self._most is None else found[: self._most - self.n_calls]
        self.n_calls += len(calls)
        for place, each in enumerate(calls):
            if each.id in self._ids:
                calls[place] = replace(each, id=None)
            elif each.id is not None:
                self._ids.add(each.id)
        return calls

    def _say(self, text: str, said: list[str]) -> None:
        kept = text.rstrip()
        if kept:
            said += [*self._space, kept]
            self._space, self._is_behind_call = [], False
        self._space.append(text[len(kept) :])
