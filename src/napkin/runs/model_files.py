"""conversation.json and quantized.json: what beside its weights makes a tuned or a quantized run usable.

conversation.json says how texts and conversations become tokens of a tuned model. A run without it was trained on
documents: each begins and ends with the separator, and there is no chat template.

quantized.json describes the folder of a quantized run, with the checksums of its other files. Beside it are
recipe.toml, tokenizer.json and, of a tuned run, conversation.json of the run that was quantized, and model.safetensors.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from napkin.errors import CorruptFile
from napkin.json_files import LARGEST, format_json, malformed, read_json
from napkin.tokenizer.base import Tokenizer

CONVERSATION_FILE = "conversation.json"

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class ConversationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of conversation.json."""

    format: Literal["napkin-conversation"]
    version: Literal[1]
    first_ids: tuple[_Id, ...]
    """Tokens before every text; a chat template writes its own."""
    stop_ids: tuple[_Id, ...]
    """Tokens at which a text ends."""
    chat_template: str | None = None
    """The template in jinja; None without one."""
    template_tokens: dict[str, str] = {}
    """Texts that the template may name: bos_token, eos_token and so on."""


def conversation_files(conversation: ConversationFile) -> dict[str, bytes]:
    """The files of a new run that `RunFolder.create` writes for it."""
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


QUANTIZED_FILE = "quantized.json"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Figure = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]


class QuantizedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of quantized.json."""

    format: Literal["napkin-quantized"]
    version: Literal[1]
    to: Literal["int8", "int4"]
    group_size: Annotated[int, msgspec.Meta(ge=2, le=2**20)]
    """Numbers that share a scale in int4."""
    step: _Count
    """Updates of the model."""
    source: str
    """The folder of the run, as it was named."""
    evaluated_tokens: _Count
    """Validation tokens of the next two numbers; 0 if there were none."""
    bits_per_byte: _Figure
    """Bits per byte after quantization."""
    original_bits_per_byte: _Figure
    """Bits per byte before quantization."""
    checksums: dict[str, str]
    """SHA-256 of the other files."""


def is_quantized(folder: Path) -> bool:
    """True for the folder of a quantized run."""
    return (folder / QUANTIZED_FILE).is_file()


def read_quantized_file(folder: Path) -> QuantizedRun:
    """Read quantized.json. Raises CorruptFile where it is not one."""
    found = read_json(folder / QUANTIZED_FILE, QuantizedRun)
    if found is None:
        raise malformed(folder / QUANTIZED_FILE, ValueError("it does not exist"))
    # Runs that were tuned have a file more.
    if found.checksums.keys() - {CONVERSATION_FILE} != {"model.safetensors", "recipe.toml", "tokenizer.json"}:
        raise CorruptFile(f"'{folder / QUANTIZED_FILE}' does not list the files of a quantized run: restore it")
    return found
