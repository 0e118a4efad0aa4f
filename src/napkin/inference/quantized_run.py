"""The folder of a quantized run: written whole or not at all, verified when it is read."""

from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from napkin.checkpoint.shard_files import checksum_of
from napkin.errors import CorruptFile, NapkinError
from napkin.files import draft_folder, refuse_irregular, sync_file, sync_folder
from napkin.json_files import write_json
from napkin.model.quantized import quantized_twin
from napkin.model.transformer import Transformer
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.runs.run_folder import (
    QUANTIZED_FILE,
    ConversationFile,
    QuantizedRun,
    RunFolder,
    conversation_files,
    read_quantized_file,
)
from napkin.tokenizer.base import Tokenizer

_WEIGHTS = "model.safetensors"


def write_quantized(
    folder: Path,
    model: Transformer,
    recipe: Recipe,
    tokenizer: Tokenizer,
    about: QuantizedRun,
    conversation: ConversationFile | None = None,
) -> int:
    """Write a quantized model; `about` gets the checksums. Returns the bytes of the weights.

    Raises NapkinError where the folder exists or cannot be written.
    """
    RunFolder.refuse_existing(folder)
    try:
        with draft_folder(folder) as draft:
            (draft / "recipe.toml").write_text(format_recipe(recipe), encoding="utf-8")
            tokenizer.save(draft / "tokenizer.json")
            for name, content in conversation_files(conversation).items() if conversation is not None else ():
                (draft / name).write_bytes(content)
            save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, draft / _WEIGHTS)
            (draft / _WEIGHTS).chmod(draft.stat().st_mode & 0o666)
            sums = {}
            for path in sorted(draft.iterdir()):
                sync_file(path)
                sums[path.name] = checksum_of(path)
            write_json(draft / QUANTIZED_FILE, msgspec.structs.replace(about, checksums=sums))
            size = (draft / _WEIGHTS).stat().st_size
            # Renaming onto a non-empty folder fails: one made in the meantime stays unchanged.
            draft.rename(folder)
            sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        raise NapkinError(f"'{folder}' cannot be written ({error}): choose another --out with free space") from None
    return size


def open_quantized(folder: Path) -> QuantizedRun:
    """Read what a folder holds. Raises CorruptFile where a file is not as it was written."""
    about = read_quantized_file(folder)
    for name, expected in about.checksums.items():
        try:
            checksum = checksum_of(folder / name)
        except OSError as error:
            raise _damaged(folder / name, f"cannot be read ({error.strerror})") from None
        if checksum != expected:
            raise _damaged(folder / name, "is not as it was written: its checksum differs")
    return about


def read_quantized(folder: Path, about: QuantizedRun) -> Transformer:
    """Read the quantized model of a folder that was opened. Raises CorruptFile where it does not fit its recipe."""
    path = folder / _WEIGHTS
    try:
        refuse_irregular(path)
        tensors = load_file(path)
        model = Transformer(RunFolder(folder).recipe.model)
        quantized_twin(model, about.to, tensors)
        model.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"does not fit its recipe ({str(error).splitlines()[0]})") from None
    if not all(each.isfinite().all() for each in model.state_dict().values() if each.dtype == torch.bfloat16):
        raise _damaged(path, "holds infinity or NaN")
    return model


def _damaged(path: Path, how: str) -> CorruptFile:
    return CorruptFile(f"'{path}' {how}: restore the file, or quantize the run again with `napkin quantize`")
