"""What stands around texts in the tokens of a run's model: its separator, or what its conversation.json says."""

from dataclasses import dataclass
from pathlib import Path

from napkin.chats.chat_template import ChatTemplate
from napkin.data.token_file import SEPARATOR
from napkin.runs.model_files import read_conversation
from napkin.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class RunTexts:
    """How texts and conversations become tokens of a model."""

    first_ids: tuple[int, ...]
    """Tokens before every text; a chat template writes its own."""
    stop_ids: tuple[int, ...]
    """Tokens at which a text ends."""
    chat_template: ChatTemplate | None


def run_texts(run: Path, tokenizer: Tokenizer) -> RunTexts:
    """Those of a run, whose tokenizer is given. Raises CorruptFile for a conversation.json that is not one."""
    found = read_conversation(run, tokenizer)
    if found is None:
        separator = (tokenizer.special_tokens[SEPARATOR],)
        return RunTexts(separator, separator, None)
    template = None if found.chat_template is None else ChatTemplate(found.chat_template, found.template_tokens)
    return RunTexts(found.first_ids, found.stop_ids, template)
