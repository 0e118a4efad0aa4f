"""The texts and settings that come with the weights of a model that was not trained here: in a Hugging Face folder, or
in a GGUF file."""

from pathlib import Path
from typing import NamedTuple

from napkin.chats.chat_template import (
    ChatTemplate,
    read_chat_template,
    read_first_ids,
    read_gguf_template,
    read_template_variables,
)
from napkin.errors import NapkinError
from napkin.inference.settings import Sampling, read_generation_config
from napkin.model.config import ModelConfig
from napkin.model.gguf.convert import read_gguf_config
from napkin.model.gguf.gguf_file import GgufFile
from napkin.model.huggingface.convert import read_huggingface_config
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.interchange.gguf import first_and_last_ids, read_bos_id, read_gguf_tokenizer
from napkin.tokenizer.interchange.huggingface import naming, read_huggingface


class ForeignTexts(NamedTuple):
    """How texts are encoded for a foreign model, and how its tokens are sampled."""

    config: ModelConfig
    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    chat_template: ChatTemplate | None
    sampling: Sampling
    bos_id: int | None
    """The token that the files call bos, whether or not it is put before texts."""


def read_foreign_texts(path: Path) -> ForeignTexts:
    """Read what a Hugging Face folder with tokenizer.json, or a GGUF file, says beside its weights.

    Raises NapkinError for a family, settings or a tokenizer that are not supported; CorruptFile for damaged files.
    """
    texts = _of_file(path) if path.is_file() else _of_folder(path)
    if texts.tokenizer.vocab_size > texts.config.vocab_size:
        raise NapkinError(
            f"'{path}' has a tokenizer of {texts.tokenizer.vocab_size} ids and a model of {texts.config.vocab_size}: "
            "download it again"
        )
    return texts


def _of_folder(path: Path) -> ForeignTexts:
    if not (path / "tokenizer.json").is_file():
        raise NapkinError(f"'{path}' has no tokenizer.json: texts cannot be turned into tokens without it")
    tokenizer = read_huggingface(path / "tokenizer.json", drop_template=True)
    start_ids, sampling = read_first_ids(path, tokenizer), read_generation_config(path)
    template, config = read_chat_template(path), read_huggingface_config(path)
    bos_id = tokenizer.special_tokens.get(read_template_variables(path).get("bos_token", ""))
    return ForeignTexts(config, tokenizer, start_ids, tuple(sampling.stop_ids), template, sampling, bos_id)


def _of_file(path: Path) -> ForeignTexts:
    with GgufFile(path) as file:
        config, metadata = read_gguf_config(file), file.metadata
    with naming(path):
        tokenizer = read_gguf_tokenizer(metadata)
        template = read_gguf_template(metadata)
    start_ids, stop_ids = first_and_last_ids(metadata, tokenizer)
    # The file does not say how its author would draw tokens.
    sampling = Sampling(temperature=0.0, top_p=1.0, stop_ids=stop_ids)
    bos_id = read_bos_id(metadata, tokenizer)
    return ForeignTexts(config, tokenizer, start_ids, stop_ids, template, sampling, bos_id)
