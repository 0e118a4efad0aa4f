"""A family of Hugging Face models: the names of its weights, and the translation of its config."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig


@dataclass(frozen=True)
class WeightMapping:
    """One parameter here, stored as one or more tensors there; matrices of experts are stacked here."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of each tensor there; empty if there is one."""
    transposed: bool = False
    less: float = 0.0
    """The number that is missing there: 1 for the gains of norms that multiply by 1 + gain."""


@dataclass(frozen=True)
class Family:
    """The names, the config and its translation for one `model_type` of config.json."""

    prefix: str
    """Prefix of all names except the head's."""
    mappings: Callable[[ModelConfig], Iterator[WeightMapping]]
    settings: type
    """The settings in config.json that `read` looks at, with their types and the library's defaults."""
    read: Callable[[Any], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    factors: Callable[[Any], dict[str, float]] = lambda settings: {}
    """Factors by expressions for parameters' names: their layers have a factor there, which is multiplied into the
    weights here."""

    def full_name(self, name: str) -> str:
        """A tensor's name in the folder of a model with its head."""
        return name if name.startswith("lm_head") else self.prefix + name


def looked_up(table: dict[str, Any], name: str, setting: str) -> Any:
    """The table's value. Raises NapkinError, naming the setting, for a name that is not in it."""
    if name not in table:
        raise NapkinError(f"{setting} is {name!r}, which is not supported: use one of {', '.join(table)}")
    return table[name]


def refuse(settings: Any, *names: str) -> None:
    """Raise NapkinError for the first of these settings that is on."""
    for name in names:
        if getattr(settings, name):
            raise NapkinError(f"{name} is {getattr(settings, name)!r}, which is not supported: use a model without it")
