"""Calls of functions in what a model writes: found while an answer grows, and written back into a conversation.

How a call is written is the chat template's choice:

| form | a call | templates |
|---|---|---|
| `HERMES` | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them | Hermes, Qwen 2.5 and 3 |
| `LLAMA` | an answer that is `{"name": ..., "parameters": {...}}` and nothing else | Llama 3.1 to 3.3 |
| `OWN` | `<NAME>text</NAME>` for a function of one text, or the form of Hermes | those that say nothing of calls |

What a model writes is data: a call that is malformed, or of a function that was not offered, stays text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from napkin.errors import NapkinError, first_line

MOST_NESTED = 100
"""Levels of lists and objects in arguments, and in the schemas of functions."""


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

    @property
    def arguments_json(self) -> str:
        """The arguments as chat templates write them."""
        return json.dumps(self.arguments, ensure_ascii=False)


def read_call(text: str, names: Iterable[str], field: str = "arguments") -> tuple[str, Any]:
    """The function that a JSON object names, and the value of its `field`, None if it has none.

    Raises NapkinError for what is not JSON, and for a function that is not among `names`.
    """
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise NapkinError(f"the call is not JSON: {first_line(error)}") from None
    name, value = (decoded.get("name"), decoded.get(field)) if isinstance(decoded, dict) else (None, None)
    if not isinstance(name, str) or name not in names:
        raise NapkinError(f"there is no such tool: use {', '.join(names)}")
    return name, value


def is_nested_deeply(value: Any) -> bool:
    """True for lists and objects in more than MOST_NESTED levels."""
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True


@dataclass(frozen=True)
class Block:
    """A text between the tags of a name."""

    name: str
    content: str

    def __str__(self) -> str:
        return f"<{self.name}>{self.content}</{self.name}>"


class TaggedText:
    """Divides a text, as it grows, into plain text and blocks `<NAME>...</NAME>`; a tag that is not closed is text.

    >>> text = TaggedText(["b"])
    >>> text.push("2 < 3 <b>yes</"), text.push("b>."), text.finish()
    (['2 < 3 '], [Block(name='b', content='yes'), '.'], [])
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._tags = [f"<{name}>" for name in names]
        self._opens = re.compile("<(" + "|".join(re.escape(tag[1:-1]) for tag in self._tags) + ")>")
        self._held, self._searched = "", 0

    def push(self, text: str) -> list[str | Block]:
        """Add text, and return the parts of the answer that are certain by now."""
        self._held += text
        return self._divided(is_whole=False)

    def finish(self) -> list[str | Block]:
        """The rest, where no more text comes."""
        return self._divided(is_whole=True)

    def _divided(self, *, is_whole: bool) -> list[str | Block]:
        held, parts, end, begin = self._held, list[str | Block](), 0, 0
        searched, self._searched = self._searched, 0
        unclosed: set[str] = set()
        while tag := self._opens.search(held, begin):
            name, begin = tag[1], tag.end()
            if name in unclosed:
                continue
            # Only the open tag has been searched for its end so far.
            close = held.find(f"</{name}>", max(begin, 0 if tag.start() else searched))
            if close >= 0:
                parts += [held[end : tag.start()], Block(name, held[begin:close])]
                begin = end = close + len(name) + 3
            elif is_whole:
                unclosed.add(name)
            else:
                self._searched = max(0, len(held) - tag.start() - len(name) - 2)
                return self._released(parts, end, tag.start())
        return self._released(parts, end, len(held) if is_whole else self._certain(held, begin))

    def _certain(self, held: str, begin: int) -> int:
        """The place up to which no tag can begin any more."""
        last = held.rfind("<", begin)
        return last if last >= 0 and any(tag.startswith(held[last:]) for tag in self._tags) else len(held)

    def _released(self, parts: list[str | Block], end: int, certain: int) -> list[str | Block]:
        parts.append(self._held[end:certain])
        self._held = self._held[certain:]
        return [each for each in parts if each != ""]


TOOL_CALL = "tool_call"
"""The name of the tag of calls in JSON."""
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class CallForm:
    """How calls are written."""

    is_tagged: bool
    """Calls are between tags; otherwise one call is a whole answer."""
    field: str
    """The field of the arguments."""
    by_name: bool = False
    """A call of a function of one text may be that text between tags of the function's name."""

    def write(self, call: FunctionCall, function: Function) -> str:
        """A call as the model would have written it."""
        text = call.arguments.get(function.text_argument or "")
        if self.is_by_name(function) and isinstance(text, str) and len(call.arguments) == 1:
            return str(Block(call.name, text))
        end = "\n</tool_call>" if self.is_tagged else ""
        return f"{self._begun(call.name)} {call.arguments_json}}}{end}"

    def beginning(self, function: Function | None) -> str:
        """The text that a call of a function begins with; None is any function."""
        if function is None:
            return self._begun(None)
        return f"<{function.name}>" if self.is_by_name(function) else self._begun(function.name)

    def is_by_name(self, function: Function) -> bool:
        """True where a call of a function is its one text between tags of its name."""
        return self.by_name and function.text_argument is not None

    def _begun(self, name: str | None) -> str:
        begun = '{"name":' if name is None else f'{{"name": {json.dumps(name)}, "{self.field}":'
        return f"<{TOOL_CALL}>\n{begun}" if self.is_tagged else begun

    def call_in(self, text: str, functions: Mapping[str, Function]) -> FunctionCall | None:
        """The call that a JSON object describes; None for anything else."""
        try:
            name, arguments = read_call(text, functions, self.field)
        except NapkinError:
            return None
        if not isinstance(arguments, dict) or is_nested_deeply(arguments):
            return None
        return FunctionCall(name, arguments)


HERMES = CallForm(is_tagged=True, field="arguments")
LLAMA = CallForm(is_tagged=False, field="parameters")
OWN = replace(HERMES, by_name=True)


def call_form(template: str) -> CallForm | None:
    """The form in which a chat template writes calls; None for one that is not known here."""
    if f"<{TOOL_CALL}>" in template and "<function=" not in template and "<arg_key>" not in template:
        return HERMES
    if "ipython" in template and '"parameters": ' in template:
        return LLAMA
    return None if "tool_calls" in template else OWN


class CallReader:
    """Divides an answer, as it grows, into its text and the calls in it.

    White space before a call is left out, and so is what stands behind the last one. `most` calls end the answer, as a
    stop text would: `ended` is True.
    """

    def __init__(self, form: CallForm, functions: Sequence[Function], *, most: int | None = None) -> None:
        self._form, self._functions = form, {each.name: each for each in functions}
        by_name = [each.name for each in functions if form.is_by_name(each)]
        self._tagged = TaggedText(dict.fromkeys([TOOL_CALL, *by_name])) if form.is_tagged else None
        self._whole = ""
        self._is_text = False
        self._space = ""
        self._most = most
        self.n_calls = 0

    @property
    def ended(self) -> bool:
        return self._most is not None and self.n_calls >= self._most

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        """The text and the calls that are certain after more of the answer."""
        return self._told(self._bare(text) if self._tagged is None else map(self._understood, self._tagged.push(text)))

    def finish(self) -> tuple[str, list[FunctionCall]]:
        """The rest, where no more of the answer comes."""
        if self._tagged is None:
            call = None if self._is_text else self._form.call_in(self._without_tag(), self._functions)
            parts: Iterable[str | FunctionCall] = [call or self._whole]
        else:
            parts = map(self._understood, self._tagged.finish())
        text, calls = self._told(parts)
        return (text if self.n_calls else text + self._space), calls

    def _understood(self, part: str | Block) -> str | FunctionCall:
        if isinstance(part, str):
            return part
        argument = self._functions[part.name].text_argument if part.name in self._functions else None
        if part.name != TOOL_CALL and argument is not None:
            return FunctionCall(part.name, {argument: part.content.strip("\n")})
        return self._form.call_in(part.content, self._functions) or str(part)

    def _bare(self, text: str) -> list[str | FunctionCall]:
        """The text of an answer that is no call; what may be one waits for its end."""
        if self._is_text:
            return [text]
        self._whole += text
        begun = self._without_tag()
        if not begun or begun.startswith("{") or _PYTHON_TAG.startswith(begun):
            return []
        self._is_text, text, self._whole = True, self._whole, ""
        return [text]

    def _without_tag(self) -> str:
        return self._whole.lstrip().removeprefix(_PYTHON_TAG).lstrip()

    def _told(self, parts: Iterable[str | FunctionCall]) -> tuple[str, list[FunctionCall]]:
        said, calls = "", list[FunctionCall]()
        for part in parts:
            if self.ended:
                break
            if isinstance(part, FunctionCall):
                calls.append(part)
                self.n_calls += 1
                self._space = ""
                continue
            text = self._space + part
            kept = text.rstrip()
            self._space = text[len(kept) :]
            said += kept
        return said, calls
