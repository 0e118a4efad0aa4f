"""How the messages of a conversation become tokens: by the model's chat template, or as plain lines.

What a message says is always ordinary text: the text of a special token in it is not that token, so that no message
can pretend to end itself and begin another.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from napkin.inference.chat_template import ChatTemplate
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.text_input import split_at, utf8


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


class TemplateChat(ChatFormat):
    """By the model's own template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the rendered template."""
        return self.encode_fields([{"role": each.role, "content": each.content} for each in messages])

    def encode_fields(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The same for messages with any fields that the template knows: texts, lists and tables of texts."""
        special = sorted(self._tokenizer.special_tokens, key=len, reverse=True)
        # A mark inside the text of a special token keeps it from being one, and is removed where text becomes tokens.
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        rendered = self._template.render([_marked(each, special, mark) for each in messages])
        utf8(rendered, "the conversation")
        # A special token holds no mark.
        return self._tokenizer.encode_parts([part.replace(mark, "") for part in split_at(rendered, special)])


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
