"""The conversion of a conversation's messages into tokens: by the model's chat template, or as plain lines.

What a message says is ordinary text: the text of a special token in it is not that token, so that no message can
pretend to end itself and begin another. Tokens that mark no boundary, such as `<think>`, are those tokens where the
assistant or the system says them; in what a user says, those that the template writes are ordinary text, and in what a
tool says, all are.
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from typing import Any, Literal

from napkin.chats.chat_template import ChatTemplate, RefusedConversation
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.text_input import utf8

_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9_-]*>")
_TRUSTED = ("assistant", "system", "developer")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which templates look for the reasoning before an answer."""
_FIELDS = frozenset(
    "role content name tool_call_id tool_calls id type function arguments description parameters properties".split()
)
"""Names by which templates read messages and tools; they are kept even if a special token has the same name."""
Fields = Mapping[str, Any]
Answers = Literal["all", "last", "none"]
"""The assistant's answers that are located."""


@dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    """`system`, `user` or `assistant`; a template may know more."""
    content: str
    thoughts: tuple[tuple[str, str], ...] = ()
    """The reasoning before an answer, by the fields of THOUGHTS."""


class ChatFormat(ABC):
    """Turns a conversation into the tokens that the model continues with its answer."""

    stop: tuple[str, ...] = ()
    """Texts before which an answer ends, besides the model's stop ids."""

    @abstractmethod
    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Encode messages up to where the answer begins. Raises NapkinError for messages that the format does not
        know."""


class PlainChat(ChatFormat):
    """For models without a template: a line per message, which begins with the role.

    >>> PlainChat.text([Message("system", "Be brief."), Message("user", "Hello")])
    'system: Be brief.\\nuser: Hello\\nassistant:'
    """

    stop = ("\nuser:", "\nsystem:")

    def __init__(self, tokenizer: Tokenizer, start_ids: Sequence[int]) -> None:
        self._tokenizer, self._start_ids = tokenizer, tuple(start_ids)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return [*self._start_ids, *self._tokenizer.encode(self.text(messages))]

    @staticmethod
    def text(messages: Sequence[Message]) -> str:
        """The lines, and the beginning of the answer's."""
        return "".join(f"{each.role}: {each.content.strip()}\n" for each in messages) + "assistant:"


class UnstableTemplate(NapkinError):
    """A template renders a turn differently once more turns follow, so its place cannot be found."""


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens, and which of them the assistant wrote."""

    ids: list[int]
    answers: list[tuple[int, int]]
    """The range of each answer's tokens, the token that ends the turn included."""


class TemplateChat(ChatFormat):
    """Conversations by the model's own template.

    An answer's tokens begin where the prompt's end, also in what was said before: a conversation has the same tokens
    when it is trained on as it had when the model was asked. `tools` are described to the model where the template does
    so, as JSON schemas of functions.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer, self._template, self._tools = tokenizer, template, list(tools)
        self._special = _SpecialTexts(tokenizer.special_tokens)
        written = _written(tokenizer, template.source)
        # Tags within a message, such as `<think>`, bound no message.
        tags = {each for each in written & tokenizer.text_tokens if _TAG.fullmatch(each)}
        no_one = {each for each in tokenizer.text_tokens if not each.isspace()}
        self._unsayable = _Unsayable(
            _SpecialTexts(written - tags), _SpecialTexts(written), _SpecialTexts(written | no_one)
        )
        self._marks_answers = bool(_MARKS_ANSWERS.search(template.source))

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "TemplateChat":
        """The same format for conversations in which the assistant may call these tools."""
        other = copy(self)
        other._tools = list(tools)
        return other

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return self.encode_fields(_fields(messages))

    def encode_fields(self, messages: Sequence[Fields]) -> list[int]:
        """`encode` for messages with any fields that the template knows: texts, lists and tables of texts."""
        (prompt,) = self._prompts([messages])
        if isinstance(prompt, NapkinError):
            raise prompt
        return prompt

    def encode_prompts(self, conversations: Sequence[Sequence[Message]]) -> list[list[int] | RefusedConversation]:
        """`encode` of each of several conversations, which are rendered together; errors are returned."""
        return self._prompts([_fields(each) for each in conversations])

    def encode_answers(self, messages: Sequence[Message], answers: Answers = "all") -> EncodedChat:
        """A whole conversation, up to its last message, and where the assistant's answers are, those that are wanted.

        A template may mark them by `{% generation %}`. Of others, an answer is what is added to the text up to where it
        begins. Raises UnstableTemplate where that text changes, RefusedConversation where the template refuses it.
        """
        (encoded,) = self.encode_batch([messages], answers)
        if isinstance(encoded, NapkinError):
            raise encoded
        return encoded

    def encode_batch(
        self, conversations: Sequence[Sequence[Message]], answers: Answers = "all"
    ) -> list[EncodedChat | UnstableTemplate | RefusedConversation]:
        """`encode_answers` of each of several conversations, which are rendered together; errors are returned."""
        renderings = [_Rendering(_fields(each), self._unsayable, self._tools) for each in conversations]
        for each in renderings:
            n, turns = len(each.messages), each.turns
            each.need("prompt", *turns)
            if self._marks_answers and answers != "none":
                each.need("marked", n)
            else:
                each.need("whole", *(turn + 1 for turn in _wanted(turns, answers)), n)
        self._render(renderings)
        if not self._marks_answers:
            for each in renderings:
                each.look_closer(_wanted(each.turns, answers))
            self._render(renderings)
        encoded: list[EncodedChat | UnstableTemplate | RefusedConversation] = []
        for each in renderings:
            try:
                encoded.append(self._encoded(each, answers))
            except (UnstableTemplate, RefusedConversation) as error:
                encoded.append(error)
        return encoded

    def _prompts(self, conversations: Sequence[Sequence[Fields]]) -> list[list[int] | RefusedConversation]:
        renderings = [_Rendering(each, self._unsayable, self._tools) for each in conversations]
        for each in renderings:
            each.need("prompt", *each.turns, len(each.messages))
        self._render(renderings)
        prompts: list[list[int] | RefusedConversation] = []
        for each in renderings:
            try:
                text = each.text("prompt", len(each.messages))
            except RefusedConversation as error:
                prompts.append(error)
            else:
                prompts.append(self._tokens(text, each.begins(text), [], each.mark)[0])
        return prompts

    def _encoded(self, rendering: "_Rendering", answers: Answers) -> EncodedChat:
        n, turns = len(rendering.messages), rendering.turns
        if answers == "none":
            text, spans = rendering.text("whole", n), []
        elif self._marks_answers:
            text, spans = rendering.marked_answers()
        else:
            text = rendering.text("whole", n)
            spans = [rendering.answer(text, turn) for turn in _wanted(turns, answers)]
        spans = spans[-1:] if answers == "last" else spans
        wanted = sorted({each for span in spans for each in span})
        ids, places = self._tokens(text, rendering.begins(text), wanted, rendering.mark)
        return EncodedChat(ids, [(places[begin], places[end]) for begin, end in spans])

    def _render(self, renderings: Sequence["_Rendering"]) -> None:
        needed = [(one, need) for one in renderings for need, text in one.texts.items() if text is None]
        texts = self._template.render_all([one.variables(need) for one, need in needed]) if needed else []
        for (one, need), text in zip(needed, texts, strict=True):
            one.texts[need] = text

    def stop_ids(self) -> tuple[int, ...]:
        """Find the special token that ends an answer, by an example; none if the template ends it otherwise."""
        # Made of letters that occur in the names of the roles: a tokenizer of characters may lack others.
        example = [Message("user", "s"), Message("assistant", "t")]
        try:
            encoded = self.encode_answers(example, "last")
        except NapkinError:
            return ()
        if not encoded.answers:
            return ()
        last = encoded.ids[encoded.answers[-1][1] - 1]
        return (last,) if last in self._tokenizer.special_tokens.values() else ()

    def _tokens(
        self, text: str, cuts: Sequence[int], wanted: Sequence[int], mark: str
    ) -> tuple[list[int], dict[int, int]]:
        """The ids of a rendered text, and how many of them end before each of the characters `wanted`.

        A token has to end before each of `cuts`. Where that does not hold for the text as a whole, the rest is encoded
        separately.
        """
        utf8(text, "the conversation")
        ids: list[int] = []
        places: dict[int, int] = {}

        @cache
        def encoded(start: int, stop: int) -> list[int]:
            return self._tokenizer.encode_parts([text[start:stop].replace(mark, "")])

        stop = 0
        # A special token holds no mark.
        for number, part in enumerate(self._special.split(text)):
            start, stop = stop, stop + len(part)
            if number % 2:
                places |= {each: len(ids) for each in wanted if start < each < stop}
                ids.append(self._tokenizer.special_tokens[part])
                continue
            pieces, inside = [start], [cut for cut in cuts if start < cut < stop]
            for cut, following in pairwise([*inside, stop]):
                head = encoded(pieces[-1], cut)
                if encoded(pieces[-1], following)[: len(head)] != head:
                    pieces.append(cut)
            for first, last in pairwise([*pieces, stop]):
                whole = encoded(first, last)
                for each in wanted:
                    if first <= each <= last:
                        pairs = zip(encoded(first, each), whole, strict=False)
                        places[each] = len(ids) + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                ids += whole
        return ids, places


class _SpecialTexts:
    """Finds the texts of special tokens in other texts."""

    def __init__(self, special: Collection[str]) -> None:
        alternatives = "|".join(re.escape(each) for each in sorted(special, key=len, reverse=True))
        self._whole = re.compile(f"({alternatives})") if special else None
        self._begins = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL) if special else None

    def split(self, text: str) -> list[str]:
        return [text] if self._whole is None else self._whole.split(text)

    def marked(self, value: Any, mark: str) -> Any:
        """Put a mark behind the first character of each special token's text, also in the names of arguments."""
        if isinstance(value, Mapping):
            names = {name: name if name in _FIELDS else self.marked(name, mark) for name in value}
            return {names[name]: self.marked(each, mark) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(each, mark) for each in value]
        return self._begins.sub(rf"\1{mark}", value) if isinstance(value, str) and self._begins else value


@dataclass(frozen=True)
class _Unsayable:
    """Special tokens whose text is ordinary text in a message, by who says it."""

    trusted: _SpecialTexts
    user: _SpecialTexts
    tool: _SpecialTexts

    def of_role(self, role: Any) -> _SpecialTexts:
        return self.trusted if role in _TRUSTED else self.tool if role == "tool" else self.user


def _written(tokenizer: Tokenizer, template: str) -> frozenset[str]:
    """The special tokens that no user or tool can say: those that mark a boundary by the tokenizer, and others that the
    template writes. White space is neither, although Gemma has tokens of it that are looked for first."""
    named = {each for each in tokenizer.text_tokens if each in template and not each.isspace()}
    return frozenset((tokenizer.special_tokens.keys() - tokenizer.text_tokens) | named)


def _wanted(turns: Sequence[int], answers: Answers) -> Sequence[int]:
    return turns if answers == "all" else turns[-1:] if answers == "last" else []


@dataclass(frozen=True)
class _Need:
    """A rendering of a conversation's first messages."""

    kind: Literal["prompt", "whole", "marked"]
    """The rendering ends where an answer begins, or with the messages, or has marks about answers too."""
    n: int
    """The number of messages."""
    replaced: int | None = None
    """The message whose content is replaced by a sign that can be found in the text."""


class _Rendering:
    """A conversation's texts by a template; boundaries in messages are marked, so that they are not taken for the
    template's."""

    def __init__(self, messages: Sequence[Fields], unsayable: _Unsayable, tools: Sequence[Mapping[str, Any]]) -> None:
        nonce = secrets.token_hex(8)
        # The mark is removed where text becomes tokens.
        self.mark, self._sign = f"\ue000{nonce}\ue001", f"\ue006{nonce}\ue007"
        self._begin_mark, self._end_mark = f"\ue002{nonce}\ue003", f"\ue004{nonce}\ue005"
        self._boundaries = unsayable.trusted
        # The description of a tool comes from whoever offers the tool, as a system message does.
        self._tools = [self._boundaries.marked(each, self.mark) for each in tools]
        self.messages = [unsayable.of_role(each.get("role")).marked(each, self.mark) for each in messages]
        self.turns = [number for number, each in enumerate(self.messages) if each.get("role") == "assistant"]
        """The numbers of the assistant's messages."""
        self.texts: dict[_Need, str | RefusedConversation | None] = {}
        """Texts by need; None until rendered."""

    def need(self, kind: Literal["prompt", "whole", "marked"], *sizes: int, replaced: int | None = None) -> None:
        """Ask for texts of the first messages."""
        for n in sizes:
            self.texts.setdefault(_Need(kind, n, replaced), None)

    def look_closer(self, turns: Sequence[int]) -> None:
        """Ask for the texts needed where prompts and answers do not simply follow one another."""
        whole = self.texts.get(_Need("whole", len(self.messages)))
        for turn in turns:
            if isinstance(whole, str) and self._simple_answer(whole, turn) is None:
                self.need("whole", turn)
                self.need("whole", turn + 1, len(self.messages), replaced=turn)
                if turn:
                    self.need("whole", len(self.messages), replaced=turn - 1)

    def variables(self, need: _Need) -> dict[str, Any]:
        """The variables of the template for a text."""
        marks = {"generation_begins": self._begin_mark, "generation_ends": self._end_mark}
        messages = list(self.messages[: need.n])
        if need.replaced is not None:
            messages[need.replaced] = {**messages[need.replaced], "content": self._sign}
        return {
            "messages": messages,
            "tools": self._tools or None,
            "documents": None,
            "add_generation_prompt": need.kind == "prompt",
            **(marks if need.kind == "marked" else {}),
        }

    def text(self, kind: Literal["prompt", "whole", "marked"], n: int, replaced: int | None = None) -> str:
        """Return a rendered text. Raises RefusedConversation."""
        text = self.texts[_Need(kind, n, replaced)]
        if isinstance(text, RefusedConversation):
            raise text
        assert text is not None
        return text

    def begins(self, text: str) -> list[int]:
        """The places where the assistant's turns begin in a text, as far as they can be found."""
        # A template may refuse the first messages alone, such as none at all.
        prompts = [self.texts[_Need("prompt", turn)] for turn in self.turns]
        return [len(each) for each in prompts if isinstance(each, str) and text.startswith(each)]

    def answer(self, text: str, turn: int) -> tuple[int, int]:
        """The range of an assistant's turn, behind the boundary that ends it, if one does. Raises UnstableTemplate
        where that cannot be told, or where the turn leaves out the reasoning."""
        parts = self._simple_answer(text, turn) or (self._begin(text, turn), self._end(text, turn))
        begin, end = parts
        if begin >= end:
            raise self._unstable(turn, "writes no answer")
        if any(each not in text[begin:end] for each in _thoughts(self.messages[turn])):
            raise self._unstable(turn, "leaves out the reasoning")
        return parts

    def _simple_answer(self, text: str, turn: int) -> tuple[int, int] | None:
        """`answer` where the text up to it is the prompt, and the text behind it goes on with what comes next; else
        None."""
        before, upto = self.texts[_Need("prompt", turn)], self.texts[_Need("whole", turn + 1)]
        if not isinstance(before, str) or not isinstance(upto, str) or len(upto) <= len(before):
            return None
        if not text.startswith(upto) or not upto.startswith(before):
            return None
        parts = self._boundaries.split(upto[len(before) :])
        if len(parts) == 1:
            return len(before), len(upto)
        return (len(before), len(upto) - len(parts[-1])) if len(parts) == 3 and not parts[-1].strip() else None

    def _begin(self, text: str, turn: int) -> int:
        """The end of the text that asks for the answer, which may be rendered differently here than in the prompt."""
        prompt, before = self.text("prompt", turn), self.text("whole", turn)
        if text.startswith(prompt):
            return len(prompt)
        shared = _common(prompt, before)
        asks = prompt[shared:]
        if text.startswith(prompt[:shared]):
            raise UnstableTemplate(
                f"the chat template asks for an answer by {asks!r} and does not write that before message {turn + 1}: "
                "use a template that does, or one with {% generation %}"
            )
        earliest = self._behind(text, turn - 1) if turn else 0
        begin = text.find(asks, earliest, self._behind(text, turn)) if asks else -1
        if begin < 0:
            raise self._unstable(turn, "changes the text before an answer")
        return begin + len(asks)

    def _end(self, text: str, turn: int) -> int:
        """The end of the boundary behind a turn, if it is there both with and without further messages."""
        tail, stop = self._follows(turn + 1, turn), self._behind(text, turn)
        if self.messages[turn].get("tool_calls"):
            # Calls follow the content, and have boundaries of their own.
            *inside, last = self._boundaries.split(tail)
            tail = "".join(inside) if inside and not last.strip() else tail
            if not text.startswith(tail, stop):
                raise self._unstable(turn, "changes the calls of tools")
            return stop + len(tail)
        parts = self._boundaries.split(tail[: _common(tail, text[stop:])])
        return stop + (len(parts[0]) + len(parts[1]) if len(parts) > 1 else 0)

    def _behind(self, text: str, message: int) -> int:
        """The place in the whole text just after a message's content, found by replacing the content."""
        behind = self._follows(len(self.messages), message)
        if not text.endswith(behind):
            raise self._unstable(message, "changes the text after it")
        return len(text) - len(behind)

    def _follows(self, n: int, message: int) -> str:
        """The text behind the content of a message, in a text of the first n."""
        _, sign, behind = self.text("whole", n, message).partition(self._sign)
        if not sign or self._sign in behind:
            raise self._unstable(message, "does not write the content unchanged, exactly once")
        return behind

    def _unstable(self, turn: int, what: str) -> UnstableTemplate:
        remedy = "use a template with {% generation %}"
        if turn + 1 < len(self.messages):
            remedy = f"learn only the last answer, or {remedy}"
        return UnstableTemplate(f"in message {turn + 1} the chat template {what}: {remedy}")

    def marked_answers(self) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the ranges that a template marks in it."""
        plain, *rest = self.text("marked", len(self.messages)).split(self._begin_mark)
        spans = []
        for piece in rest:
            answer, _, behind = piece.partition(self._end_mark)
            if self._end_mark in behind or len(piece) == len(answer):
                raise UnstableTemplate(
                    "the chat template has a {% generation %} block within another: use one block per answer"
                )
            spans.append((len(plain), len(plain) + len(answer)))
            plain += answer + behind
        return plain, [(begin, end) for begin, end in spans if begin < end]


def _thoughts(message: Fields) -> list[str]:
    """The reasoning of an answer: in a separate field, or before `</think>`."""
    content = message.get("content")
    before = content.partition("</think>") if isinstance(content, str) else ("", "", "")
    inline = before[0].rpartition("<think>")[2] if before[1] else ""
    said = [message.get(name) for name in THOUGHTS]
    return [each.strip() for each in (*said, inline) if isinstance(each, str) and each.strip()]


def _common(one: str, other: str) -> int:
    """Length of the common beginning of two texts, in characters."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _fields(messages: Sequence[Message]) -> list[Fields]:
    return [{"role": each.role, "content": each.content, **dict(each.thoughts)} for each in messages]


def chat_format(tokenizer: Tokenizer, template: ChatTemplate | None, first_ids: Sequence[int]) -> ChatFormat:
    """The format of a model with that template; None is the plain one, whose texts begin with `first_ids`."""
    return PlainChat(tokenizer, first_ids) if template is None else TemplateChat(tokenizer, template)
