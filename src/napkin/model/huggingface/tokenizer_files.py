"""The files beside a model's weights with which `transformers` reads a prompt as napkin does, and stops where it stops.

tokenizer.json encodes and decodes; its post-processor puts the separator before every text, since each document in
training began after one. tokenizer_config.json says which token is special for what, generation_config.json where a
completion ends.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.model.config import ModelConfig
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.interchange.huggingface import write_huggingface

SEPARATOR = "<|endoftext|>"
"""What training puts between documents."""


@dataclass(frozen=True)
class TextEnds:
    """What stands around texts in a model's tokens."""

    first_ids: tuple[int, ...]
    """Before every text; a chat template writes its own."""
    stop_ids: tuple[int, ...]
    """Where a text ends."""
    chat_template: str | None = None
    template_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts that the template may name, such as eos_token."""


def separated_by(tokenizer: Tokenizer, separator: str) -> TextEnds:
    """Those of a model whose documents begin and end with a special token. Raises NapkinError where the tokenizer has
    none of that name."""
    if separator not in tokenizer.special_tokens:
        raise NapkinError(
            f"the tokenizer has no special token '{separator}': name one of "
            f"{', '.join(tokenizer.special_tokens) or 'its own, of which it has none'} as the separator"
        )
    number = (tokenizer.special_tokens[separator],)
    return TextEnds(number, number)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, config: ModelConfig, ends: TextEnds) -> dict[str, int]:
    """Write the tokenizer's files; returns the settings of config.json that name special tokens.

    Raises NapkinError if the tokenizer is not the model's, or cannot be written exactly.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise NapkinError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}: use the one it was trained "
            "with"
        )
    path = folder / "tokenizer.json"
    write_huggingface(tokenizer, path)
    named = {number: token for token, number in tokenizer.special_tokens.items()}
    document = json.loads(path.read_text("utf-8")) | {"post_processor": _begin_with(ends.first_ids, named)}
    atomic_write_text(path, json.dumps(document, ensure_ascii=False, indent=1) + "\n", overwrite=True)
    # There is often no other token that could fill up a batch; it is masked there.
    wanted = {"bos_token": ends.first_ids[:1], "eos_token": ends.stop_ids[:1], "pad_token": ends.stop_ids[:1]}
    ids = {f"{name}_id": number for name, numbers in wanted.items() for number in numbers}
    tokens = {name.removesuffix("_id"): named[number] for name, number in ids.items() if number in named}
    described: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **ends.template_tokens,
            **tokens,
            "add_bos_token": bool(ends.first_ids),
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.context_length,
        },
        "special_tokens_map.json": tokens,
        "generation_config.json": ids | ({"eos_token_id": list(ends.stop_ids)} if len(ends.stop_ids) > 1 else {}),
    }
    for name, settings in described.items():
        atomic_write_text(folder / name, json.dumps(settings, ensure_ascii=False, indent=2) + "\n")
    if ends.chat_template is not None:
        atomic_write_text(folder / "chat_template.jinja", ends.chat_template)
    return ids


def _begin_with(first_ids: Sequence[int], named: Mapping[int, str]) -> dict[str, Any] | None:
    if not first_ids:
        return None
    first = [{"SpecialToken": {"id": named[number], "type_id": 0}} for number in first_ids]
    text, second = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*first, text],
        "pair": [*first, text, second],
        "special_tokens": {
            named[number]: {"id": named[number], "ids": [number], "tokens": [named[number]]} for number in first_ids
        },
    }
