"""quantized.json: what the folder of a quantized run holds, and the checksums of its other files.

Beside it are recipe.toml, tokenizer.json and, of a tuned run, conversation.json of the run that was quantized, and
model.safetensors.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from napkin.errors import CorruptFile
from napkin.runs.conversation_file import CONVERSATION_FILE
from napkin.runs.json_file import LARGEST, malformed, read_json

QUANTIZED_FILE = "quantized.json"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Figure = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]


class QuantizedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """quantized.json."""

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
    """Validation tokens that the next two figures are for; 0 if there were none."""
    bits_per_byte: _Figure
    """After quantization."""
    original_bits_per_byte: _Figure
    """Before."""
    checksums: dict[str, str]
    """SHA-256 of the other files."""


def is_quantized(folder: Path) -> bool:
    """Whether a folder is that of a quantized run."""
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
