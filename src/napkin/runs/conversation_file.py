"""conversation.json of a tuned run: how texts and conversations become tokens of its model.

A run without it was trained on documents: each begins and ends with the separator, and there is no chat template.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from napkin.errors import CorruptFile
from napkin.runs.json_file import format_json, read_json
from napkin.tokenizer.base import Tokenizer

CONVERSATION_FILE = "conversation.json"

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class ConversationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """conversation.json."""

    format: Literal["napkin-conversation"]
    version: Literal[1]
    first_ids: tuple[_Id, ...]
    """Tokens before every text; a chat template writes its own."""
    stop_ids: tuple[_Id, ...]
    """Tokens at which a text ends."""
    chat_template: str | None = None
    """In jinja's language; None has none."""
    template_tokens: dict[str, str] = {}
    """Texts that the template may name: bos_token, eos_token and so on."""


def conversation_files(conversation: ConversationFile) -> dict[str, bytes]:
    """What `RunFolder.create` writes for it."""
    return {CONVERSATION_FILE: format_json(conversation).encode()}


def read_conversation(run: Path, tokenizer: Tokenizer) -> ConversationFile | None:
    """Read a run's conversation.json; None where it has none. Raises CorruptFile where it is not one, or is not of that
    tokenizer."""
    found = read_json(run / CONVERSATION_FILE, ConversationFile)
    if found is None:
        return None
    for each in (*found.first_ids, *found.stop_ids):
        if each >= tokenizer.vocab_size:
            raise CorruptFile(
                f"'{run / CONVERSATION_FILE}' names token {each}, the tokenizer has {tokenizer.vocab_size}: restore it"
            )
    return found
