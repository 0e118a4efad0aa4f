"""Models in and out of Hugging Face folders: config.json and safetensors, for models of GPT-2's and Llama's shape.

A folder holds weights under other names, some of them apart that are one matrix here, some transposed. What one matrix
here is made of is a `Piece`; a family is its pieces and the translation of its config.
"""

import dataclasses
import json
import os
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
from napkin.model.huggingface.families import FAMILIES, Family, Piece
from napkin.model.transformer import Transformer

# What the weights do not depend on: how they began, how they are trained, what computes attention.
_FREE = frozenset("init init_std depth_scaled dropout attention z_weight balance_weight router_z_weight".split())


def load_huggingface(folder: StrPath) -> Transformer:
    """The model in a Hugging Face folder, weights in fp32; it gives the logits that `transformers` gives.

    Raises NapkinError for a folder without a config, of a family or with settings that are not GPT-2's or Llama's;
    CorruptFile where weights are missing or have other shapes than the config says.
    """
    folder = Path(folder)
    settings = _read_json(folder / "config.json")
    config, family = _read_config(settings, folder)
    model = Transformer(config)
    parameters = dict(model.named_parameters())
    with _Weights(folder, family) as weights, torch.no_grad():
        for piece in family.pieces(config):
            _fill(parameters[piece.ours], piece, weights)
    return model


def save_huggingface(model: Transformer, folder: StrPath) -> None:
    """Write a model as a new Hugging Face folder, weights in the format that they have.

    The folder appears whole or not at all. Raises NapkinError where it exists, and where the model is of neither
    GPT-2's nor Llama's shape: the message names the first setting that stands in the way.
    """
    folder = Path(folder)
    if os.path.lexists(folder):
        raise NapkinError(f"'{folder}' exists and is not overwritten: remove it or choose another name")
    family, settings = _family_of(model.config)
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for piece in family.pieces(model.config):
        parts = parameters[piece.ours].detach().split(piece.rows or (len(parameters[piece.ours]),))
        for name, part in zip(piece.theirs, parts, strict=True):
            tensors[family.full_name(name)] = (part.T if piece.transposed else part).contiguous()
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    try:
        draft.mkdir()
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        sync_file(draft / "model.safetensors")
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
    """The family that says the most of the config, if it says all: its settings are read back and compared."""
    obstacles: list[list[str]] = []
    for family in FAMILIES.values():
        settings = family.write(config)
        different = [
            f"{name} {ours!r}"
            for name, ours, theirs in _compared(config, family.read(settings))
            if ours != theirs and name not in _FREE
        ]
        if not different:
            return family, settings
        obstacles.append(different)
    nearest = min(obstacles, key=len)
    raise NapkinError(f"neither GPT-2 nor Llama has {nearest[0]}: a Hugging Face folder cannot say it")


def _compared(ours: ModelConfig, theirs: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(ModelConfig):
        resolved = {"rope_original_context": "resolved_original_context"}.get(field.name, f"resolved_{field.name}")
        name = resolved if hasattr(ours, resolved) else field.name
        yield field.name, getattr(ours, name), getattr(theirs, name)


def _fill(parameter: Tensor, piece: Piece, weights: "_Weights") -> None:
    parts = [weights.read(name) for name in piece.theirs]
    whole = torch.cat([part.T if piece.transposed else part for part in parts])
    if whole.shape != parameter.shape:
        raise CorruptFile(
            f"'{weights.folder}': {' + '.join(piece.theirs)} have shape {tuple(whole.shape)}, its config.json says "
            f"{tuple(parameter.shape)}: download it again"
        )
    parameter.copy_(whole)


class _Weights:
    """The tensors of a folder's safetensors, one file or many."""

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
        """A tensor in fp32; folders made from a bare model leave the prefix off."""
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
