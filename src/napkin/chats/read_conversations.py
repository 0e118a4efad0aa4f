"""Conversations from files of JSON lines, in three forms.

| form | a line |
|---|---|
| messages | `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}` |
| prompt and completion | `{"prompt": "...", "completion": "..."}`: texts, or lists of messages |
| turns by speaker | `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}` |

Each line is read by itself, with errors that name it; an encoder makes token sequences of the conversations.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from napkin.chats.chat_encoder import ChatEncoder, LeftOut
from napkin.chats.chat_format import THOUGHTS, Message, UnstableTemplate
from napkin.chats.chat_template import RefusedConversation
from napkin.chats.token_sequence import Example
from napkin.errors import NapkinError, first_line
from napkin.files import StrPath, regular

MOST_LINE_BYTES = 2**24
"""The longest line: some four million tokens."""


def json_lines(path: StrPath) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file and the numbers of their lines, from 1; lines of white space are none.

    Raises NapkinError where the file cannot be read, and for a line that is not a JSON object or is too long.
    """
    path = Path(path)
    decoder = msgspec.json.Decoder(dict[str, Any])
    try:
        with open(path, "rb", opener=regular) as file:
            number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    raise in_line(path, number, f"has more than {MOST_LINE_BYTES:,} bytes: divide it or leave it out")
                if line.isspace():
                    continue
                try:
                    yield number, decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise in_line(
                        path, number, f"is not a JSON object ({first_line(error)}): mend it or leave it out"
                    ) from None
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a file of JSON lines") from None


def in_line(path: StrPath, number: int, problem: str) -> NapkinError:
    """The error for a line of a file."""
    return NapkinError(f"'{path}' line {number:,} {problem}")


ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {"human": "user", "gpt": "assistant"}
_FORMS = '"messages", "prompt" and "completion", or "conversations"'
MOST_MESSAGES = 2000
"""The longest conversation: each answer's place is found by rendering everything before it."""


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
    """The messages of a line in one of the three forms, or of a document that the stage `conversations` made."""
    inner = fields.get("fields")
    if isinstance(inner, Mapping) and "messages" in inner and "messages" not in fields:
        fields = inner
    if "messages" in fields:
        return as_messages(fields["messages"], "messages")
    if "conversations" in fields:
        return as_messages(fields["conversations"], "conversations")
    if "prompt" in fields and "completion" in fields:
        prompt, completion = fields["prompt"], fields["completion"]
        return [*_one_or_more(prompt, "user", "prompt"), *_one_or_more(completion, "assistant", "completion")]
    names = ", ".join(f'"{name}"' for name in list(fields)[:5]) or "nothing"
    raise WrongForm(f"has {names}: a conversation has {_FORMS}")


def as_messages(value: Any, name: str) -> list[Message]:
    """Read the messages of a field."""
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
    """The reason why a conversation cannot be trained on; empty if it can."""
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
    """A conversation with contents besides text."""


_BATCH, _BATCH_CHARACTERS = 64, 2**20
Item = TypeVar("Item")


def encoded_chats(
    path: StrPath, encoder: ChatEncoder, left_out: LeftOut, max_length: int
) -> Iterator[tuple[int, Example]]:
    """The conversations of a file of JSON lines as tokens, each with its line.

    Those that the template refuses, of which nothing is learned, or which are longer than `max_length` tokens are left
    out and counted. Raises NapkinError for a template that writes earlier turns otherwise, exceeds its limits or cannot
    be read, and for lines that are not conversations.
    """
    for batch in in_batches(read_chats(path, left_out, needs_answer=encoder.train_on != "all"), _characters):
        sequences = encoder.sequences([chat.messages for chat in batch])
        for chat, sequence in zip(batch, sequences, strict=True):
            if isinstance(sequence, UnstableTemplate):
                raise in_line(path, chat.line, f"cannot be learned from: {sequence}")
            if isinstance(sequence, RefusedConversation):
                left_out.add(chat.line, refused(sequence))
            elif isinstance(sequence, NapkinError):
                left_out.add(chat.line, "of which no token is learned")
            elif len(sequence.tokens) > max_length:
                left_out.add(chat.line, longer_than(max_length))
            else:
                yield chat.line, (sequence,)


def in_batches(items: Iterable[Item], characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Batches to render together, of a bounded number of characters."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += characters(item)
        if len(batch) == _BATCH or size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def refused(error: RefusedConversation) -> str:
    """The reason for leaving out a conversation that the template does not render."""
    return f"refused by the chat template ({error.reason})"


def longer_than(max_length: int) -> str:
    """The reason for leaving out a conversation that is too long."""
    return f"longer than {max_length:,} tokens"


def _characters(chat: Conversation) -> int:
    """About how many characters are rendered for a conversation."""
    return sum(len(message.content) for message in chat.messages) * len(chat.messages)
