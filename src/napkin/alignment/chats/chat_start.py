"""The chat encoder of a model that tuning starts from, and of a tuned run; what the run keeps of it."""

from pathlib import Path

import msgspec

from napkin.alignment.chats.chat_encoder import ChatEncoder, Learned
from napkin.alignment.start_model import StartModel
from napkin.data.token_file import SEPARATOR
from napkin.files import StrPath
from napkin.inference.chat_template import ChatTemplate, read_template_file, read_template_variables
from napkin.inference.run_texts import run_texts
from napkin.runs.conversation_file import conversation_files
from napkin.tokenizer.base import Tokenizer


def encoder_of_start(start: StartModel, chat_template: StrPath = "", learned: Learned = "assistant") -> ChatEncoder:
    """The encoder of a model that is to be tuned.

    The template is that of the file `chat_template`, or the model's own, or the built-in one. Raises NapkinError where
    it cannot be read, or the tokenizer lacks what the built-in one needs.
    """
    template = start.chat_template
    if chat_template:
        template = ChatTemplate(read_template_file(chat_template), _variables(start))
    return ChatEncoder(start.tokenizer, template, start.first_ids, stop_ids=start.stop_ids, learned=learned)


def encoder_of_tokenizer(
    tokenizer: Tokenizer, chat_template: StrPath = "", learned: Learned = "assistant"
) -> ChatEncoder:
    """The encoder of models that are trained from scratch with a tokenizer: their texts stand between separators."""
    separators = [tokenizer.special_tokens[SEPARATOR]] if SEPARATOR in tokenizer.special_tokens else []
    template = ChatTemplate(read_template_file(chat_template), _separators(tokenizer)) if chat_template else None
    return ChatEncoder(tokenizer, template, separators, stop_ids=separators, learned=learned)


def encoder_of_run(run: Path, tokenizer: Tokenizer, learned: Learned = "assistant") -> ChatEncoder:
    """The encoder of a tuned run, by its conversation.json."""
    texts = run_texts(run, tokenizer)
    return ChatEncoder(tokenizer, texts.chat_template, texts.first_ids, stop_ids=texts.stop_ids, learned=learned)


def conversation_files_of(encoder: ChatEncoder, start: StartModel) -> dict[str, bytes]:
    """What a run that is tuned with an encoder keeps, by the names of files, so that it is asked as it was trained."""
    kept = start.conversation_file(encoder.template)
    return conversation_files(msgspec.structs.replace(kept, stop_ids=encoder.stop_ids))


def _variables(start: StartModel) -> dict[str, str]:
    """The special tokens that a template may name."""
    if start.chat_template is not None:
        return dict(start.chat_template.special_tokens)
    if variables := read_template_variables(start.folder):
        return variables
    return _separators(start.tokenizer)


def _separators(tokenizer: Tokenizer) -> dict[str, str]:
    return {"bos_token": SEPARATOR, "eos_token": SEPARATOR} if SEPARATOR in tokenizer.special_tokens else {}
