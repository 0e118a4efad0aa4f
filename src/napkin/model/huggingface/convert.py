"""Models in and out of Hugging Face folders (config.json and safetensors), as GPT-2, Llama or Granite.

In a folder the weights have other names; some are transposed, and some that are one matrix here are several there. A
`WeightMapping` says how one parameter is stored; a family is its mappings and the translation of its config.
"""

import dataclasses
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, atomic_write_text, sync_file, sync_folder
from napkin.model.config import ModelConfig
from napkin.model.huggingface.families import FAMILIES, Family, WeightMapping
from napkin.model.huggingface.tokenizer_files import SEPARATOR, write_tokenizer
from napkin.model.transformer import Transformer
from napkin.tokenizer.base import Tokenizer

# Fields that do not change what the weights compute: initialization, training, the implementation of attention.
_NOT_STORED = frozenset("init init_std depth_scaled dropout attention z_weight balance_weight router_z_weight".split())


def load_huggingface(folder: StrPath) -> Transformer:
    """The model in a Hugging Face folder, weights in fp32, with the same logits as in `transformers`.

    Raises NapkinError for a folder without a config, and for a family or settings other than GPT-2's, Llama's and
    Granite's; CorruptFile if weights are missing or their shapes do not match the config.
    """
    folder = Path(folder)
    settings = _read_json(folder / "config.json")
    config, family = _read_config(settings, folder)
    model = Transformer(config)
    parameters = dict(model.named_parameters())
    with _Weights(folder, family) as weights, torch.no_grad():
        for mapping in family.mappings(config):
            _fill(parameters[mapping.ours], mapping, weights)
        for expression, factor in family.factors(settings).items():
            for name, parameter in parameters.items():
                if re.fullmatch(expression, name):
                    parameter.mul_(factor)
    return model


def save_huggingface(
    model: Transformer, folder: StrPath, *, tokenizer: Tokenizer | None = None, separator: str = SEPARATOR
) -> None:
    """Write a model as a new Hugging Face folder, weights in their own dtype; with a tokenizer, it goes there too.

    A model of GPT-2's or Llama's architecture is saved as one, and one with scales of its own, as of a tied embedding,
    as Granite's. `separator` is the special token with which documents begin and end: `transformers` puts it before
    every text and stops at it.

    The folder appears whole or not at all. Raises NapkinError if it exists, if the model's architecture is none of
    these, naming the first setting that differs, and if the tokenizer is not a byte-level BPE.
    """
    folder = Path(folder)
    if os.path.lexists(folder):
        raise NapkinError(f"'{folder}' exists and is not overwritten: remove it or choose another name")
    family, settings = _family_of(model.config)
    settings |= {"dtype": str(model.head_weight.dtype).removeprefix("torch.")}
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for mapping in family.mappings(model.config):
        parts = parameters[mapping.ours].detach().split(mapping.rows or (len(parameters[mapping.ours]),))
        for name, part in zip(mapping.theirs, parts, strict=True):
            tensors[family.full_name(name)] = (part.T if mapping.transposed else part).contiguous()
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    try:
        draft.mkdir()
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        sync_file(draft / "model.safetensors")
        if tokenizer is not None:
            settings |= write_tokenizer(tokenizer, draft, model.config, separator)
        atomic_write_text(draft / "config.json", json.dumps(settings, indent=2) + "\n")
        os.rename(draft, folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        raise NapkinError(
            f"'{folder}' cannot be written ({error}): choose a folder whose parent exists, that you may write to and "
            "that has room"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _read_config(settings: dict[str, Any], folder: Path) -> tuple[ModelConfig, Family]:
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise NapkinError(f"'{folder}' holds a model of type {kind!r}: use one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    try:
        return family.read(settings), family
    except KeyError as error:
        raise NapkinError(f"'{folder / 'config.json'}' lacks {error}: a {kind} model needs it") from None
    except NapkinError as error:
        raise NapkinError(f"'{folder / 'config.json'}': {error}") from None


def _family_of(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The family whose settings describe the config completely: they are read back and compared."""
    obstacles: list[list[str]] = []
    for family in FAMILIES.values():
        settings = family.write(config)
        different = [
            f"{name} {ours!r}"
            for name, ours, theirs in _compared(config, family.read(settings))
            if ours != theirs and name not in _NOT_STORED
        ]
        if not different:
            return family, settings
        obstacles.append(different)
    nearest = min(obstacles, key=len)
    raise NapkinError(f"none of GPT-2, Llama and Granite has {nearest[0]}: it cannot be saved as a Hugging Face folder")


def _compared(ours: ModelConfig, theirs: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(ModelConfig):
        resolved = {"rope_original_context": "resolved_original_context"}.get(field.name, f"resolved_{field.name}")
        name = resolved if hasattr(ours, resolved) else field.name
        yield field.name, getattr(ours, name), getattr(theirs, name)


def _fill(parameter: Tensor, mapping: WeightMapping, weights: "_Weights") -> None:
    parts = [weights.read(name) for name in mapping.theirs]
    whole = torch.cat([part.T if mapping.transposed else part for part in parts])
    if whole.shape != parameter.shape:
        raise CorruptFile(
            f"'{weights.folder}': {' + '.join(mapping.theirs)} have shape {tuple(whole.shape)}, its config.json says "
            f"{tuple(parameter.shape)}: download it again"
        )
    parameter.copy_(whole)


class _Weights:
    """The tensors in a folder's safetensors, in one file or several."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder = folder
        self.family = family
        index = folder / "model.safetensors.index.json"
        names = set(_read_json(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
        self.paths = [folder / name for name in sorted(names)]

    def __enter__(self) -> "_Weights":
        try:
            self.files = [safe_open(path, "pt") for path in self.paths]
        except FileNotFoundError as error:
            raise NapkinError(f"'{self.folder}' holds no safetensors ({error}): pickled weights are not read") from None
        except SafetensorError as error:
            raise CorruptFile(f"'{self.folder}': damaged safetensors ({error}): download it again") from None
        self.file_of = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118
        return self

    def __exit__(self, *exception: object) -> None:
        self.files.clear()
        self.file_of.clear()

    def read(self, name: str) -> Tensor:
        """A tensor in fp32; folders saved from a model without its head lack the prefix."""
        for known in (self.family.full_name(name), name):
            if known in self.file_of:
                return self.file_of[known].get_tensor(known).float()
        raise CorruptFile(f"'{self.folder}' lacks the weight {self.family.full_name(name)}: download it again")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a Hugging Face model's folder") from None
    except ValueError as error:
        raise CorruptFile(f"'{path}' is not JSON ({error}): download it again") from None
