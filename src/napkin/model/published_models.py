"""Published models by name: their configs, and their published numbers of parameters."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from napkin.errors import NapkinError, same_name, suggestion
from napkin.model.config import ModelConfig
from napkin.toml_files import packaged_toml


@dataclass(frozen=True)
class Preset:
    """A published model; figures and sources in presets.toml."""

    name: str
    model: ModelConfig
    parameters: int
    """Number of parameters as published, each tensor counted once."""
    source: str
    """Where the figures come from."""


def preset(name: str, **changes: Any) -> ModelConfig:
    """The config of a published model, with some fields changed.

    >>> preset("gpt2").n_layers, preset("llama-3-8b", context_length=1024).context_length
    (12, 1024)

    Case does not matter. Raises NapkinError for a name that is not a preset.
    """
    known = presets()
    found = same_name(name, known)
    if found is None:
        raise NapkinError(f"'{name}' is not a preset: {suggestion(name, known)}")
    return dataclasses.replace(known[found].model, **changes)


@functools.cache
def presets() -> dict[str, Preset]:
    tables = packaged_toml("napkin.model", "presets.toml", dict[str, Any])
    shapes = tables.pop("shapes")
    return {name: _preset(name, table, shapes) for name, table in tables.items()}


def _preset(name: str, table: dict[str, Any], shapes: dict[str, dict[str, Any]]) -> Preset:
    own = dict(table["model"])
    return Preset(name, ModelConfig(**shapes[own.pop("like")], **own), table["parameters"], table["source"])
