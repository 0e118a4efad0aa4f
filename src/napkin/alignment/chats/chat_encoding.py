"""Conversations of a file become token sequences; see `napkin.alignment.chats.read_conversations` for the lines."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from napkin.alignment.chats.chat_encoder import ChatEncoder
from napkin.alignment.chats.json_lines import in_line
from napkin.alignment.chats.left_out import LeftOut
from napkin.alignment.chats.read_conversations import Conversation, read_chats
from napkin.alignment.token_sequence import Unit
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.inference.chat_format import UnstableTemplate
from napkin.inference.chat_template import RefusedConversation

_BATCH, _BATCH_CHARACTERS = 64, 2**20
Item = TypeVar("Item")


def encoded_chats(
    path: StrPath, encoder: ChatEncoder, left_out: LeftOut, max_length: int
) -> Iterator[tuple[int, Unit]]:
    """The conversations of a file of JSON lines as tokens, each with its line.

    Those that the template refuses, of which nothing is learned, or which are longer than `max_length` tokens are left
    out and counted. Raises NapkinError for a template that writes earlier turns otherwise, exceeds its limits or cannot
    be read, and for lines that are not conversations.
    """
    for batch in in_batches(read_chats(path, left_out, needs_answer=encoder.learned != "all"), _characters):
        found = encoder.sequences([chat.messages for chat in batch])
        for chat, sequence in zip(batch, found, strict=True):
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
    """What is rendered together: some, of not too many characters."""
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
    """The reason for leaving out what the template does not render."""
    return f"refused by the chat template ({error.reason})"


def longer_than(max_length: int) -> str:
    """The reason for leaving out what is too long."""
    return f"longer than {max_length:,} tokens"


def _characters(chat: Conversation) -> int:
    """Of what is rendered, about."""
    return sum(len(message.content) for message in chat.messages) * len(chat.messages)
