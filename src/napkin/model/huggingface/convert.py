"""Models in and out of Hugging Face folders (config.json and safetensors).

In a folder the weights have other names; some are transposed, and some that are one matrix here are several there.
`families.py` says how a family's config and weights are stored.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import StrPath, atomic_write_text, draft_folder, sync_file, sync_folder
from napkin.model.config import ModelConfig
from napkin.model.huggingface.families import Family
from napkin.model.huggingface.folder_files import SEPARATOR, TextForm, path_inside, read_json, write_tokenizer
from napkin.model.huggingface.stateful_families import ALL_FAMILIES
from napkin.model.transformer import Transformer
from napkin.optim.tensor_parts import Parts, matrix_parts, whole_parts
from napkin.tokenizer.base import Tokenizer

# The longest known is 10 million; tables of positions are as long as the context.
_MAX_CONTEXT = 2**24
# Numbers of a table of angles: 1 GiB each of cosines and sines, eight times those of a context of 262,144.
_MAX_TABLE = 2**28

# Fields that do not change what the weights compute: initialization, training, the implementation of attention.
_NOT_STORED = frozenset("init init_std depth_scaled dropout attention z_weight balance_weight router_z_weight".split())
# Fields without meaning where no layer has attention, or none carries a state.
_OF_ATTENTION = frozenset(
    "n_heads n_kv_heads head_dim rope_theta rope_pairing rope_scaling rope_factor rope_original_context "
    "attention_window full_attention_every attention_softcap attention_scale qk_norm".split()
)
_OF_STATES = frozenset("state_size state_heads state_head_dim state_groups conv_width".split())


def load_huggingface(folder: StrPath, *, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model in a Hugging Face folder, in evaluation mode, with the same logits as in `transformers`.

    Nothing outside the folder is opened, and nothing is allocated before all shapes are known to match the config.
    Raises NapkinError for a folder without a config, and for a family or settings that are not supported; CorruptFile
    if weights are missing or their shapes do not match the config.
    """
    folder = Path(folder)
    config, family, factors = _read_config(folder)
    with _Weights(folder, family) as weights:
        check_shapes(config, weights)
        model = Transformer(config, dtype=dtype)
        fill(whole_parts(model), config, weights, factors)
    return model.eval()


def family_in(folder: Path) -> tuple[Family, dict[str, float]]:
    """The family of the model in a Hugging Face folder, and the factors by which its weights are multiplied here, by an
    expression for their names. Raises as `load_huggingface`."""
    return _read_config(folder)[1:]


def read_huggingface_config(folder: StrPath) -> ModelConfig:
    """The config of the model in a Hugging Face folder, whose weights are not read. Raises as `load_huggingface`."""
    return _read_config(Path(folder))[0]


def load_huggingface_into(model: Transformer, folder: StrPath) -> None:
    """Copy the weights of a Hugging Face folder into a model that computes the same function, in the model's dtype.

    Parameters of the model that are not the config's, such as adapters, stay as they are. Raises as `load_huggingface`,
    and NapkinError for a model of another config; the model is unchanged then.
    """
    load_huggingface_parts(model.config, whole_parts(model), folder)


def load_huggingface_parts(of: ModelConfig, parts: Parts, folder: StrPath) -> None:
    """`load_huggingface_into` for some parts of a model of the config `of`: nothing else of the files is read."""
    folder = Path(folder)
    config, family, factors = _read_config(folder)
    refuse_other_function(of, config, str(folder))
    with _Weights(folder, family) as weights:
        check_shapes(config, weights)
        fill(parts, config, weights, factors)


def refuse_other_function(config: ModelConfig, start: ModelConfig, where: str) -> None:
    """Raise NapkinError where weights made for the config `start`, which is that of `where`, compute something else in
    a model of another: fields of initialization, training and implementation may differ."""
    for name, ours, theirs in differences(config, start):
        raise NapkinError(f"model.{name} is {ours!r}, that of '{where}' is {theirs!r}: use the latter, or leave it out")


@runtime_checkable
class StoredWeights(Protocol):
    """The tensors of a model in files, by the names that its family has for them."""

    path: Path
    family: Family

    def __len__(self) -> int: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read. Raises CorruptFile where it is missing."""
        ...

    def read(self, name: str, rows: slice, columns: slice, *, transposed: bool) -> Tensor:
        """Some rows and columns of a matrix, which may be stored transposed, in fp32; a vector is a column."""
        ...


@torch.no_grad()
def fill(parts: Parts, config: ModelConfig, weights: StoredWeights, factors: dict[str, float]) -> None:
    """Copy stored weights, whose shapes are right, into parts of a model of the config, each times its factor."""
    for mapping in weights.family.mappings(config):
        factor = math.prod(each for name, each in factors.items() if re.fullmatch(name, mapping.ours))
        for part in matrix_parts(parts.get(mapping.ours, ())):
            first, last = part.first_row, part.first_row + len(part.values)
            columns = slice(part.first_column, part.first_column + part.values.shape[1])
            start = 0
            for name, height in zip(mapping.theirs, mapping.rows or (last,), strict=True):
                rows = slice(max(first - start, 0), min(last - start, height))
                if rows.start < rows.stop:
                    read = weights.read(name, rows, columns, transposed=mapping.transposed)
                    here = part.values[start + rows.start - first : start + rows.stop - first]
                    here.copy_((read + mapping.less) * factor)
                start += height


def save_huggingface(
    model: Transformer,
    folder: StrPath,
    *,
    tokenizer: Tokenizer | None = None,
    separator: str = SEPARATOR,
    form: TextForm | None = None,
) -> None:
    """Write a model as a new Hugging Face folder, weights in their own dtype; with a tokenizer, it goes there too.

    It is saved as the first family that has all its settings: gpt2, llama, granite for a model with scales of its own,
    as of a tied embedding, mistral, mixtral, qwen2, qwen3, olmo2, gemma2, mamba2 or granitemoehybrid. `separator` is
    the special token with which documents begin and end: `transformers` puts it before every text and stops at it;
    `form`, in its place, is that of a model of conversations.

    The folder appears whole or not at all. Raises NapkinError if it exists, if no family has the model's architecture,
    naming the first setting that differs from the nearest, and if the tokenizer is not a byte-level BPE.
    """
    refuse_existing(Path(folder))
    family, settings = family_of(model.config)
    settings |= {"dtype": str(model.head_weight.dtype).removeprefix("torch.")}
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for mapping in family.mappings(model.config):
        whole = as_matrix(parameters[mapping.ours].detach())
        for name, part in zip(mapping.theirs, whole.split(mapping.rows or len(whole)), strict=True):
            stored = part - mapping.less if mapping.less else part
            if parameters[mapping.ours].ndim == 3 and parameters[mapping.ours].shape[1] == 1:
                stored = stored[:, None]  # the filters of a convolution
            tensors[family.full_name(name)] = (stored.T if mapping.transposed else stored).contiguous()
    with new_folder(Path(folder)) as draft:
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        sync_file(draft / "model.safetensors")
        if tokenizer is not None:
            settings |= write_tokenizer(tokenizer, draft, model.config, form or TextForm((separator,), (separator,)))
        atomic_write_text(draft / "config.json", json.dumps(settings, indent=2) + "\n")


def refuse_existing(folder: Path) -> None:
    """Raise NapkinError for a folder that exists."""
    if os.path.lexists(folder):
        raise NapkinError(f"'{folder}' exists and is not overwritten: remove it or choose another name")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` at the end of the block, whole or not at all.

    Raises NapkinError where it cannot be written.
    """
    try:
        with draft_folder(folder) as draft:
            yield draft
            os.rename(draft, folder)
            sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        raise NapkinError(
            f"'{folder}' cannot be written ({error}): choose a folder whose parent exists, that you may write to and "
            "that has room"
        ) from error


def as_matrix(parameter: Tensor) -> Tensor:
    """The matrices of experts stacked into one; any other parameter unchanged."""
    return parameter.flatten(0, 1) if parameter.ndim == 3 else parameter


def _read_config(folder: Path) -> tuple[ModelConfig, Family, dict[str, float]]:
    return config_of(read_json(folder / "config.json"), folder / "config.json")


def config_of(settings: dict[str, Any], path: Path) -> tuple[ModelConfig, Family, dict[str, float]]:
    """The config that the settings of a config.json describe, its family, and the factors of weights by an expression
    for their names; `path` is named in errors. Raises NapkinError for what is not supported."""
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in ALL_FAMILIES:
        raise NapkinError(f"'{path}' holds a model of type {str(kind)[:100]!r}: use one of {', '.join(ALL_FAMILIES)}")
    family = ALL_FAMILIES[kind]
    for field in msgspec.structs.fields(family.settings):
        if field.required and field.name not in settings:
            raise NapkinError(f"'{path}' lacks {field.name!r}: a {kind} model needs it")
    if settings.get("quantization_config"):
        raise NapkinError(f"'{path}' is of quantized weights, which are not supported: use the model before it")
    try:
        known = msgspec.convert(settings, family.settings)
        config, factors = family.read(known), family.factors(known)
    except msgspec.ValidationError as error:
        raise NapkinError(f"'{path}' is not that of a {kind} model ({error}): download it again") from None
    except (ArithmeticError, ValueError) as error:
        raise NapkinError(f"'{path}' holds a number that no model has ({error}): download it again") from None
    except NapkinError as error:
        raise NapkinError(f"'{path}': {error}") from None
    if config.context_length > _MAX_CONTEXT:
        raise NapkinError(f"'{path}' has a context of {config.context_length} tokens, more than {_MAX_CONTEXT}")
    if config.positions == "rope" and config.context_length * config.resolved_head_dim > _MAX_TABLE:
        raise NapkinError(
            f"'{path}' has heads of {config.resolved_head_dim} and a context of {config.context_length} tokens, whose "
            f"rotary tables would have more than {_MAX_TABLE} numbers each: use a smaller max_position_embeddings"
        )
    return config, family, factors


def family_of(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The family whose settings describe a config completely, and these settings: they are read back and compared.

    Raises NapkinError where none does, naming the first settings that differ from the nearest.
    """
    obstacles: list[list[str]] = []
    for kind, family in ALL_FAMILIES.items():
        try:
            settings = {"model_type": kind, **family.write(config)}
            stored = family.read(msgspec.convert(settings, family.settings))
        except NapkinError:
            continue  # The family has no way of writing a value, such as no feed-forward layer.
        different = [f"{name} {ours!r}" for name, ours, _ in differences(config, stored)]
        if not different:
            return family, settings
        obstacles.append(different)
    nearest = min(obstacles, key=len)
    names = ", ".join(ALL_FAMILIES)
    raise NapkinError(f"none of {names} has {' and '.join(nearest[:2])}: it cannot be saved as a Hugging Face folder")


def differences(config: ModelConfig, other: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """The fields that make two models compute something else of the same weights, and their values."""
    without = _NOT_STORED | (frozenset() if config.n_attention_layers else _OF_ATTENTION)
    without |= frozenset() if config.has_states else _OF_STATES
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = config.resolved(field.name), other.resolved(field.name)
        are_floats = isinstance(ours, float) and isinstance(theirs, float)
        same = math.isclose(ours, theirs, rel_tol=1e-12) if are_floats else ours == theirs
        if not same and field.name not in without:
            yield field.name, ours, theirs


def check_shapes(config: ModelConfig, weights: StoredWeights) -> None:
    """Raise CorruptFile unless the weights that a config asks for are there, in the shapes that it has."""
    # Each layer has a weight of its own. Sizes without end would take all memory, even without their numbers.
    if config.n_layers > len(weights):
        raise CorruptFile(
            f"'{weights.path}' has {len(weights)} weights, the config says {config.n_layers} layers: download it again"
        )
    try:
        with torch.device("meta"):
            shapes = {name: parameter.shape for name, parameter in Transformer(config).named_parameters()}
    except (RuntimeError, ArithmeticError, MemoryError, TypeError) as error:
        raise CorruptFile(
            f"'{weights.path}': no model has the sizes of the config ({first_line(error)}): download it again"
        ) from None
    for mapping in weights.family.mappings(config):
        *stacked, width = shapes[mapping.ours]
        # Matrices of experts are stacked row-wise.
        shape = (math.prod(stacked), width) if stacked else (width,)
        for name, rows in zip(mapping.theirs, mapping.rows or shape[:1], strict=True):
            expected = (rows, *shape[1:])
            if (actual := weights.shape(name)) != (expected[::-1] if mapping.transposed else expected):
                raise CorruptFile(
                    f"'{weights.path}': the weights {name} have shape {actual}, the config says {expected}: "
                    "download it again"
                )


class _Weights:
    """The tensors in a folder's safetensors, in one file or several."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.path = folder
        self.family = family

    def __enter__(self) -> "_Weights":
        try:
            self.files = [safe_open(path, "pt") for path in weight_files(self.path)]
            self.file_of = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise NapkinError(f"'{self.path}' holds no safetensors ({error}): pickled weights are not read") from None
        except SafetensorError as error:
            raise CorruptFile(f"'{self.path}': damaged safetensors ({error}): download it again") from None
        return self

    def __exit__(self, *exception: object) -> None:
        self.files.clear()
        self.file_of.clear()

    def __len__(self) -> int:
        return len(self.file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read; filters of a convolution are a matrix."""
        known = self._known(name)
        shape = tuple(self.file_of[known].get_slice(known).get_shape())
        return (shape[0], shape[2]) if len(shape) == 3 and shape[1] == 1 else shape

    def read(self, name: str, rows: slice, columns: slice, *, transposed: bool) -> Tensor:
        """Read some rows and columns of a matrix, which may be stored transposed, widened to fp32; a vector is a
        column."""
        known = self._known(name)
        stored = self.file_of[known].get_slice(known)
        if len(stored.get_shape()) == 1:
            return stored[rows].float()[:, None]
        if len(stored.get_shape()) == 3:
            return stored[rows, :, columns].float()[:, 0]
        return stored[columns, rows].float().T if transposed else stored[rows, columns].float()

    def _known(self, name: str) -> str:
        # Folders saved from a model without its head lack the prefix.
        for known in (self.family.full_name(name), name):
            if known in self.file_of:
                return known
        raise CorruptFile(f"'{self.path}' lacks the weight {self.family.full_name(name)}: download it again")


def weight_files(folder: Path) -> list[Path]:
    """The files of a Hugging Face folder that hold weights, by name: those of its index, or one.

    Raises OSError where one cannot be looked at, NapkinError where one is outside of the folder, CorruptFile for an
    index that is not one.
    """
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if os.path.lexists(index):
        try:
            # Weight names do not matter, the files have them too.
            names = set(msgspec.convert(read_json(index), _Index).weight_map.values())
        except msgspec.ValidationError as error:
            raise CorruptFile(f"'{index}' is not an index of weights ({error}): download it again") from None
    return [path_inside(folder, name) for name in sorted(names)]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
