"""Conversations from files of JSON lines, in three forms.

| form | a line |
|---|---|
| messages | `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}` |
| prompt and completion | `{"prompt": "...", "completion": "..."}`: texts, or lists of messages |
| turns by speaker | `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}` |
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from napkin.alignment.chats.json_lines import in_line, json_lines
from napkin.alignment.chats.left_out import LeftOut
from napkin.files import StrPath
from napkin.inference.chat_format import THOUGHTS, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {"human": "user", "gpt": "assistant"}
_FORMS = '"messages", "prompt" and "completion", or "conversations"'
MOST_MESSAGES = 2000
"""Of a conversation: each answer's place is found by rendering what comes before it."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the line that they are in."""

    line: int
    messages: tuple[Message, ...]


def read_chats(path: StrPath, left_out: LeftOut | None = None, *, needs_answer: bool = True) -> Iterator[Conversation]:
    """The conversations of a file, one at a time.

    With `needs_answer`, those in which the assistant says nothing, or the first thing, are left out and counted in
    `left_out`; so are contents that are not text. Raises NapkinError, naming the line, for one that is of no known form
    or has an unknown role.
    """
    left_out = LeftOut() if left_out is None else left_out
    for line, fields in json_lines(path):
        try:
            messages = messages_of(fields)
        except WrongForm as error:
            raise in_line(path, line, str(error)) from None
        except NotText as error:
            left_out.add(line, str(error))
            continue
        if reason := _why_not(messages, needs_answer=needs_answer):
            left_out.add(line, reason)
        else:
            yield Conversation(line, tuple(messages))


def messages_of(fields: Mapping[str, Any]) -> list[Message]:
    """The messages of a line in one of the three forms."""
    if "messages" in fields:
        return as_messages(fields["messages"], "messages")
    if "conversations" in fields:
        return as_messages(fields["conversations"], "conversations")
    if "prompt" in fields and "completion" in fields:
        prompt, completion = fields["prompt"], fields["completion"]
        return [*_one_or_more(prompt, "user", "prompt"), *_one_or_more(completion, "assistant", "completion")]
    found = ", ".join(f'"{name}"' for name in list(fields)[:5]) or "nothing"
    raise WrongForm(f"has {found}: a conversation has {_FORMS}")


def as_messages(value: Any, name: str) -> list[Message]:
    """The messages of a field."""
    if not isinstance(value, list) or not value:
        raise WrongForm(f'has "{name}" that is not a list of messages: give one or more messages')
    return [_message(each, number, name) for number, each in enumerate(value, start=1)]


def _one_or_more(value: Any, role: str, name: str) -> list[Message]:
    return [Message(role, value)] if isinstance(value, str) else as_messages(value, name)


def _message(value: Any, number: int, name: str) -> Message:
    if not isinstance(value, dict):
        raise WrongForm(f'has {type(value).__name__} as number {number} of "{name}": give a role and a content')
    role = value.get("role", value.get("from"))
    role = _SPEAKERS.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        shown = repr(role)[:50]
        raise WrongForm(f'has the role {shown} as number {number} of "{name}": use one of {", ".join(ROLES)}')
    if value.get("tool_calls"):
        raise NotText("with calls of tools, which are not text")
    content = value.get("content", value.get("value"))
    if isinstance(content, list):
        parts = [each.get("text") if isinstance(each, dict) else None for each in content]
        texts = [each for each in parts if isinstance(each, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise NotText("with a content that is not text")
    thoughts = [(name, value[name]) for name in THOUGHTS if isinstance(value.get(name), str) and value[name]]
    return Message(role, content, tuple(thoughts))


def _why_not(messages: list[Message], *, needs_answer: bool) -> str:
    """Why a conversation cannot be learned from; empty if it can."""
    if len(messages) > MOST_MESSAGES:
        return f"with more than {MOST_MESSAGES:,} messages"
    if not needs_answer:
        return ""
    if not any(each.role == "assistant" and each.content.strip() for each in messages):
        return "without an answer of the assistant's"
    if messages[0].role == "assistant":
        return "that the assistant begins"
    return ""


class WrongForm(Exception):
    """A line that is not a conversation."""


class NotText(Exception):
    """A conversation of more than text."""
