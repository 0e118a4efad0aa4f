"""How the messages of a conversation become tokens: by the model's chat template, or as plain lines.

What a message says is always ordinary text: the text of a special token in it is not that token, so that no message
can pretend to end itself and begin another.
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from typing import Any

from napkin.errors import NapkinError
from napkin.inference.chat_template import ChatTemplate, RefusedConversation
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.text_input import split_at, utf8

_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """Something said in a conversation."""

    role: str
    """`system`, `user` or `assistant`; a template may know more."""
    content: str


class ChatFormat(ABC):
    """Turns a conversation into the tokens that the model continues with its answer."""

    stop: tuple[str, ...] = ()
    """Texts before which an answer ends, besides the model's stop ids."""

    @abstractmethod
    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to where the answer begins. Raises NapkinError for messages that the format does not know."""


class PlainChat(ChatFormat):
    """For models without a template: a line per message, which begins with the role.

    >>> PlainChat.text([Message("system", "Be brief."), Message("user", "Hello")])
    'system: Be brief.\\nuser: Hello\\nassistant:'
    """

    stop = ("\nuser:", "\nsystem:")

    def __init__(self, tokenizer: Tokenizer, start_ids: Sequence[int]) -> None:
        self._tokenizer, self._start_ids = tokenizer, tuple(start_ids)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the lines, after what stands before every text."""
        return [*self._start_ids, *self._tokenizer.encode(self.text(messages))]

    @staticmethod
    def text(messages: Sequence[Message]) -> str:
        """The lines, and the beginning of the answer's."""
        return "".join(f"{each.role}: {each.content.strip()}\n" for each in messages) + "assistant:"


class UnstableTemplate(NapkinError):
    """A template renders a turn otherwise once more turns follow, so that its place cannot be found."""


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens, and which of them the assistant says."""

    ids: list[int]
    answers: list[tuple[int, int]]
    """Where the tokens of each answer begin and end, the token that ends the turn included."""


class TemplateChat(ChatFormat):
    """By the model's own template.

    An answer's tokens begin where the prompt's end, also in what was said before: a conversation has the same tokens
    when it is trained on as it had when the model was asked.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._marks_answers = bool(_MARKS_ANSWERS.search(template.source))

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the rendered template."""
        return self.encode_fields(_fields(messages))

    def encode_fields(self, messages: Sequence[Fields]) -> list[int]:
        """The same for messages with any fields that the template knows: texts, lists and tables of texts."""
        rendering = _Rendering(self._template, messages, self._special)
        text = rendering.prompt(len(messages))
        begins = rendering.begins(text, len(messages))
        return self._tokens(text, begins, [], rendering.mark)[0]

    def encode_answers(self, messages: Sequence[Message], *, only_last: bool = False) -> EncodedChat:
        """A whole conversation, up to its last message, and where the assistant's answers are; or the last of them.

        A template may mark them by `{% generation %}`. Of others, an answer is what is added to the text up to where it
        begins. Raises UnstableTemplate where that text changes.
        """
        rendering = _Rendering(self._template, _fields(messages), self._special)
        if self._marks_answers:
            text, spans = rendering.marked_answers()
        else:
            text = rendering.whole(len(messages))
            spans = [
                rendering.answer(text, turn)
                for turn in (rendering.turns(len(messages))[-1:] if only_last else rendering.turns(len(messages)))
            ]
        spans = spans[-1:] if only_last else spans
        begins = rendering.begins(text, len(messages))
        ids, places = self._tokens(text, begins, sorted({each for span in spans for each in span}), rendering.mark)
        return EncodedChat(ids, [(places[begin], places[end]) for begin, end in spans])

    def encode_whole(self, messages: Sequence[Message]) -> EncodedChat:
        """A whole conversation, whose answers are not looked for."""
        rendering = _Rendering(self._template, _fields(messages), self._special)
        text = rendering.whole(len(messages))
        return EncodedChat(self._tokens(text, rendering.begins(text, len(messages)), [], rendering.mark)[0], [])

    def stop_ids(self) -> tuple[int, ...]:
        """The special token that ends an answer, by an example; none if the template ends it otherwise."""
        example = [Message("user", "a"), Message("assistant", "b")]
        try:
            encoded = self.encode_answers(example, only_last=True)
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

        A token ends before each of `cuts`. Where that is not so of the text as a whole, the rest is encoded apart.
        """
        utf8(text, "the conversation")
        ids: list[int] = []
        places: dict[int, int] = {}

        @cache
        def encoded(start: int, stop: int) -> list[int]:
            return self._tokenizer.encode(text[start:stop].replace(mark, ""))

        stop = 0
        # A special token holds no mark.
        for number, part in enumerate(split_at(text, self._special)):
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


class _Rendering:
    """A conversation's texts by a template; special tokens in messages have a mark, which keeps them from being any."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Fields], special: Sequence[str]) -> None:
        self._template, self._special = template, special
        nonce = secrets.token_hex(8)
        # The mark is removed where text becomes tokens.
        self.mark = f"\ue000{nonce}\ue001"
        self._begin_mark, self._end_mark = f"\ue002{nonce}\ue003", f"\ue004{nonce}\ue005"
        self._messages = [_marked(each, special, self.mark) for each in messages]
        self._prompts: dict[int, str] = {}

    def prompt(self, n: int) -> str:
        """The first n messages, up to where an answer begins."""
        if n not in self._prompts:
            self._prompts[n] = self._template.render(self._messages[:n])
        return self._prompts[n]

    def whole(self, n: int) -> str:
        """The first n messages."""
        return self._template.render(self._messages[:n], add_generation_prompt=False)

    def turns(self, n: int) -> list[int]:
        """Which of the first n messages are the assistant's."""
        return [number for number, each in enumerate(self._messages[:n]) if each.get("role") == "assistant"]

    def begins(self, text: str, n: int) -> list[int]:
        """Where the assistant's turns among n messages begin in their text, those that can be found."""
        found = []
        for turn in self.turns(n):
            try:
                before = self.prompt(turn)
            except RefusedConversation:
                # The first messages alone, such as none at all.
                continue
            if text.startswith(before):
                found.append(len(before))
        return found

    def answer(self, text: str, turn: int) -> tuple[int, int]:
        """Where an assistant's turn begins and ends: behind the special token that ends it, if one does."""
        before = self.prompt(turn)
        upto = text if turn == len(self._messages) - 1 else self.whole(turn + 1)
        if not text.startswith(before) or not text.startswith(upto) or len(upto) <= len(before):
            raise UnstableTemplate(
                f"the chat template writes message {turn + 1} or those before it otherwise where more follow, so that "
                "its answers cannot be told apart: learn only the last answer, or use a template with {% generation %}"
            )
        parts = split_at(text[len(before) : len(upto)], self._special)
        if len(parts) > 1 and not parts[-1].strip():
            return len(before), len(upto) - len(parts[-1])
        return len(before), len(upto)

    def marked_answers(self) -> tuple[str, list[tuple[int, int]]]:
        """The text and what a template marks in it."""
        text = self._template.render(
            self._messages,
            add_generation_prompt=False,
            generation_begins=self._begin_mark,
            generation_ends=self._end_mark,
        )
        plain, spans = "", []
        begin: int | None = None
        for piece in re.split(f"({self._begin_mark}|{self._end_mark})", text):
            if piece == self._begin_mark and begin is None:
                begin = len(plain)
            elif piece == self._end_mark and begin is not None:
                spans.append((begin, len(plain)))
                begin = None
            elif piece in (self._begin_mark, self._end_mark):
                raise UnstableTemplate(
                    "the chat template has a {% generation %} block within another: use one block per answer"
                )
            else:
                plain += piece
        return plain, [(begin, end) for begin, end in spans if begin < end]


def _fields(messages: Sequence[Message]) -> list[Fields]:
    return [{"role": each.role, "content": each.content} for each in messages]


def chat_format(tokenizer: Tokenizer, template: ChatTemplate | None, first_ids: Sequence[int]) -> ChatFormat:
    """The format of a model with that template; None has none, and its texts begin with `first_ids`."""
    return PlainChat(tokenizer, first_ids) if template is None else TemplateChat(tokenizer, template)


def _marked(value: Any, special: Sequence[str], mark: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _marked(each, special, mark) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each, special, mark) for each in value]
    if isinstance(value, str):
        for token in special:
            value = value.replace(token, token[0] + mark + token[1:])
    return value
