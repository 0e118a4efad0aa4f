"""The files of a Hugging Face folder besides the weights, with which `transformers` reads a prompt as napkin does, and
stops where it stops. Folders are untrusted: no file outside of one is opened, and sizes are bounded.

tokenizer.json encodes and decodes; its post-processor puts the separator before every text, since each document in
training began after one. tokenizer_config.json gives the roles of special tokens, generation_config.json where a
completion ends, chat_template.jinja how the messages of a conversation become a text.
"""

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import StrPath, atomic_write_text, regular
from napkin.model.config import ModelConfig
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.interchange.huggingface import write_huggingface

# An index of a hundred thousand weights has ten million.
_MAX_JSON_CHARACTERS = 2**26


def path_inside(folder: Path, name: str) -> Path:
    """The path of a regular file in a folder.

    Raises NapkinError for any other name, and for links to other places; OSError if it cannot be looked at.
    """
    path = folder / name
    if name in ("", ".", "..") or len(name) > 255 or any(character in name for character in "/\\:\0"):
        raise NapkinError(f"'{folder}' names the file {name[:200]!r}, which is not in the folder: download it again")
    try:
        whole = path.resolve(strict=True)
    except RuntimeError as error:
        raise OSError(errno.ELOOP, first_line(error)) from None
    # In the hub's cache, a folder of links stands beside the folder of files, two levels up.
    if whole.parent not in (folder.resolve(), (folder / ".." / ".." / "blobs").resolve()):
        raise NapkinError(f"'{path}' is a link to a place outside of the folder: copy the file")
    if not whole.is_file():
        raise NapkinError(f"'{path}' is not a file: name a Hugging Face model's folder")
    return path


def is_huggingface(folder: StrPath) -> bool:
    """True if a folder looks like a Hugging Face model."""
    return (Path(folder) / "config.json").exists()


def read_text(path: Path, most_characters: int = _MAX_JSON_CHARACTERS) -> str:
    """The text of a file in a folder; see `path_inside`.

    Raises NapkinError if it cannot be read, CorruptFile if it is not UTF-8 or has more characters.
    """
    try:
        with open(path_inside(path.parent, path.name), encoding="utf-8", opener=regular) as file:
            text = file.read(most_characters + 1)
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a Hugging Face model's folder") from None
    except ValueError as error:
        raise CorruptFile(f"'{path}' is not UTF-8 ({error}): download it again") from None
    if len(text) > most_characters:
        raise CorruptFile(f"'{path}' has more than {most_characters} characters: download it again")
    return text


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a folder; raises what `read_text` does, and CorruptFile for anything else."""
    try:
        value = json.loads(read_text(path))
    except RecursionError:
        raise CorruptFile(f"'{path}' is nested too deeply: download it again") from None
    except ValueError as error:
        raise CorruptFile(f"'{path}' is not JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"'{path}' is not a JSON object: download it again")
    return value


SEPARATOR = "<|endoftext|>"
"""The token that training puts between documents."""


_NAMES = ("bos_token", "eos_token", "pad_token")


@dataclass(frozen=True)
class TextForm:
    """The special tokens around texts, and how conversations are written."""

    first: Sequence[str] = (SEPARATOR,)
    """Tokens before every text."""
    stops: Sequence[str] = (SEPARATOR,)
    """Tokens at which a text ends."""
    chat_template: str | None = None
    """A template in jinja's language."""
    template_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts that the template may name: bos_token, eos_token and so on."""


def write_tokenizer(tokenizer: Tokenizer, folder: Path, config: ModelConfig, form: TextForm) -> dict[str, int]:
    """Write the tokenizer's files; returns the settings of config.json that name special tokens.

    Raises NapkinError if the tokenizer is not the model's, lacks a special token, or cannot be written exactly.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise NapkinError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}: use the one it was trained "
            "with"
        )
    for token in (*form.first, *form.stops):
        if token not in tokenizer.special_tokens:
            raise NapkinError(
                f"the tokenizer has no special token '{token}': name one of "
                f"{', '.join(tokenizer.special_tokens) or 'its own, of which it has none'} as the separator"
            )
    path = folder / "tokenizer.json"
    write_huggingface(tokenizer, path)
    ids = {token: tokenizer.special_tokens[token] for token in (*form.first, *form.stops)}
    if form.first:
        document = json.loads(path.read_text("utf-8")) | {"post_processor": _begin_with(form.first, ids)}
        atomic_write_text(path, json.dumps(document, ensure_ascii=False, indent=1) + "\n", overwrite=True)
    # There is no other token that could fill up a batch; it is masked there.
    first, last = [*form.first, *form.stops][:1], form.stops[:1]
    tokens = {name: each[0] for name, each in zip(_NAMES, (first, last, last), strict=True) if each}
    settings = {f"{name}_id": ids[token] for name, token in tokens.items()}
    ends = {"eos_token_id": [ids[token] for token in form.stops]} if len(form.stops) > 1 else {}
    described: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokens,
            # A template was written with these.
            **form.template_tokens,
            "add_bos_token": bool(form.first),
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.context_length,
        },
        "special_tokens_map.json": {**tokens, **form.template_tokens},
        "generation_config.json": {**settings, **ends},
    }
    if form.chat_template is not None:
        atomic_write_text(folder / "chat_template.jinja", form.chat_template)
    for name, content in described.items():
        atomic_write_text(folder / name, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
    return settings


def _begin_with(tokens: Sequence[str], ids: Mapping[str, int]) -> dict[str, Any]:
    first: list[dict[str, Any]] = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    text, second = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*first, text],
        "pair": [*first, text, second],
        "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in tokens},
    }
