"""The files beside a model's weights with which `transformers` reads a prompt as napkin does, and stops where it stops.

tokenizer.json encodes and decodes; its post-processor puts the separator before every text, since each document in
training began after one. tokenizer_config.json says which token is special for what, generation_config.json where a
completion ends.
"""

import json
from pathlib import Path
from typing import Any

from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.model.config import ModelConfig
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.interchange.huggingface import write_huggingface

SEPARATOR = "<|endoftext|>"
"""What training puts between documents."""


def write_tokenizer(tokenizer: Tokenizer, folder: Path, config: ModelConfig, separator: str) -> dict[str, int]:
    """Write the tokenizer's files; returns the settings of config.json that name special tokens.

    Raises NapkinError if the tokenizer is not the model's, lacks the separator, or cannot be written exactly.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise NapkinError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}: use the one it was trained "
            "with"
        )
    if separator not in tokenizer.special_tokens:
        raise NapkinError(
            f"the tokenizer has no special token '{separator}': name one of "
            f"{', '.join(tokenizer.special_tokens) or 'its own, of which it has none'} as the separator"
        )
    path = folder / "tokenizer.json"
    write_huggingface(tokenizer, path)
    number = tokenizer.special_tokens[separator]
    document = json.loads(path.read_text("utf-8")) | {"post_processor": _begin_with(separator, number)}
    atomic_write_text(path, json.dumps(document, ensure_ascii=False, indent=1) + "\n", overwrite=True)
    # There is no other token that could fill up a batch; it is masked there.
    ids = {"bos_token_id": number, "eos_token_id": number, "pad_token_id": number}
    tokens = {name.removesuffix("_id"): separator for name in ids}
    described: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokens,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.context_length,
        },
        "special_tokens_map.json": tokens,
        "generation_config.json": ids,
    }
    for name, settings in described.items():
        atomic_write_text(folder / name, json.dumps(settings, ensure_ascii=False, indent=2) + "\n")
    return ids


def _begin_with(token: str, number: int) -> dict[str, Any]:
    first: dict[str, Any] = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
