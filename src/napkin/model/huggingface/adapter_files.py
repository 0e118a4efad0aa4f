"""Adapters as peft reads them: adapter_config.json and adapter_model.safetensors, beside a Hugging Face model.

In peft a layer is one matrix, or, as in GPT-2, several that are stacked: a stack gets one adapter of the summed ranks,
whose B has zeros where a matrix does not read another's A.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_text, sync_file
from napkin.model.adapters import Adapter, adapted_layers
from napkin.model.huggingface.convert import family_in, family_of, new_folder, refuse_existing
from napkin.model.huggingface.families import Family, WeightMapping
from napkin.model.transformer import Transformer


def save_adapters(model: Transformer, folder: StrPath, *, base: StrPath | None = None) -> None:
    """Write the adapters of a model as a new folder that peft reads, for the model in the Hugging Face folder `base`;
    None is the one that `save_huggingface` writes of the model without adapters.

    The folder appears whole or not at all. Raises NapkinError if it exists, for a model without adapters, and where no
    family has the model's architecture.
    """
    refuse_existing(Path(folder))
    layers = {f"{name}.weight": (layer.weight.detach(), adapter) for name, layer, adapter in adapted_layers(model)}
    if not layers:
        raise NapkinError("the model has no adapters: export it whole")
    family, factors = (family_of(model.config)[0], {}) if base is None else family_in(Path(base))
    adapted: list[_Layer] = []
    for mapping in family.mappings(model.config):
        if mapping.ours in layers:
            factor = math.prod(each for name, each in factors.items() if re.fullmatch(name, mapping.ours))
            adapted += _layers_of(mapping, *layers[mapping.ours], family, factor)
    names = {family.full_name(each) for mapping in family.mappings(model.config) for each in mapping.theirs}
    config = _config(adapted, {name.removesuffix(".weight") for name in names}, next(iter(layers.values()))[1])
    config["base_model_name_or_path"] = "" if base is None else str(base)
    with new_folder(Path(folder)) as draft:
        tensors = {f"{_PREFIX}{each.name}.{kind}": tensor for each in adapted for kind, tensor in each.tensors.items()}
        save_file(tensors, draft / "adapter_model.safetensors", metadata={"format": "pt"})
        sync_file(draft / "adapter_model.safetensors")
        atomic_write_text(draft / "adapter_config.json", json.dumps(config, indent=2) + "\n")


_PREFIX = "base_model.model."


@dataclass(frozen=True)
class _Layer:
    """A layer there that has an adapter."""

    name: str
    tensors: dict[str, Tensor]
    n: int
    """Number of napkin's adapters that it represents."""
    transposed: bool


def _layers_of(
    mapping: WeightMapping, weight: Tensor, adapter: Adapter, family: Family, factor: float
) -> Iterator[_Layer]:
    """The layers there that have a part of an adapter here.

    `factor` is what the weights there were multiplied by to be those here: what is added to them is divided by it.
    """
    start = 0
    for theirs, height in zip(mapping.theirs, mapping.rows or (len(weight),), strict=True):
        stop = start + height
        within = [(each, a.detach(), b.detach()) for each, a, b in adapter.products() if start <= each.start < stop]
        if within:
            whole = torch.zeros(height, len(within) * adapter.rank, dtype=adapter.b.dtype)
            for place, (each, _, b) in enumerate(within):
                rows = slice(each.start - start, each.stop - start)
                whole[rows, place * adapter.rank : (place + 1) * adapter.rank] = b / factor
            tensors = {"lora_A.weight": torch.cat([a for _, a, _ in within]).cpu(), "lora_B.weight": whole}
            if adapter.magnitude is not None:
                tensors["lora_magnitude_vector"] = adapter.lengths(weight)[start:stop].cpu() / factor
            name = family.full_name(theirs).removesuffix(".weight")
            yield _Layer(name, tensors, len(within), mapping.transposed)
        start = stop


def _config(layers: list[_Layer], all_names: set[str], adapter: Adapter) -> dict[str, Any]:
    """The contents of adapter_config.json."""
    adapted = {each.name for each in layers}

    def short(name: str) -> str:
        """The end of a name, as long as need be so that only layers with adapters have it."""
        parts = name.split(".")
        ends = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        return next(end for end in ends if {each for each in all_names if f".{each}".endswith(f".{end}")} <= adapted)

    stacked = {short(each.name): each.n for each in layers if each.n > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": adapter.magnitude is not None,
        "fan_in_fan_out": any(each.transposed for each in layers),
        "target_modules": sorted({short(each.name) for each in layers}),
        "rank_pattern": {name: n * adapter.rank for name, n in stacked.items()},
        "alpha_pattern": {name: n * adapter.alpha for name, n in stacked.items()},
    }
