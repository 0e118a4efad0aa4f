"""Recipes as TOML files: errors are reported by field when reading, and every field is written."""

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from napkin.errors import NapkinError
from napkin.files import StrPath, regular
from napkin.near_names import suggestion
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_text import parse_toml
from napkin.recipe.tuning_recipe import RECIPE_OF

_MAX_CHARACTERS = 2**20


def read_recipe(path: StrPath) -> Recipe:
    """Read a recipe from a TOML file; fields that are not in it keep their defaults.

    Raises NapkinError for a missing file, TOML that cannot be read, an unknown field, a value of the wrong type or
    outside its range.
    """
    path = Path(path)
    try:
        # Some editors begin a file with a byte order mark.
        values = parse_toml(_read_bounded(path))
    except FileNotFoundError:
        raise NapkinError(f"'{path}' does not exist: name a recipe, a TOML file as `napkin recipe` prints it") from None
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a recipe, a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NapkinError(f"'{path}' is not TOML ({error}): correct it there") from None
    except (RecursionError, ValueError) as error:
        # Nested too deeply, or a number of thousands of digits: well-formed, but not readable.
        raise NapkinError(f"'{path}' holds a value that cannot be read ({error}): correct it") from None
    kind = recipe_class(values, str(path))
    _refuse_unknown(values, kind, str(path))
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise NapkinError(
            f"'{path}': {str(error).replace('`$.', '`')}: `napkin train --help all` lists the types"
        ) from None
    except NapkinError as error:
        raise NapkinError(f"'{path}': {error}") from None


def recipe_class(values: Mapping[str, Any], where: str) -> type[Recipe]:
    """The kind of a recipe with those tables: one with [tuning] is that of its method. Raises NapkinError for another
    method than there is."""
    tuning = values.get("tuning")
    if tuning is None:
        return Recipe
    method = tuning.get("method", "sft") if isinstance(tuning, dict) else tuning
    if not isinstance(method, str) or method not in RECIPE_OF:
        raise NapkinError(f"'{where}': tuning.method is {method!r}: use one of {', '.join(RECIPE_OF)}")
    return RECIPE_OF[method]


def _read_bounded(path: Path) -> str:
    """The text of a TOML file, which is not a gigabyte by mistake."""
    with open(path, encoding="utf-8-sig", opener=regular) as file:
        text = file.read(_MAX_CHARACTERS + 1)
    if len(text) > _MAX_CHARACTERS:
        raise NapkinError(f"'{path}' has more than {_MAX_CHARACTERS} characters: name a recipe, a TOML file")
    return text


def format_recipe(recipe: Recipe) -> str:
    """A recipe as TOML with every field; None, which TOML does not have, is left out where it is the default."""
    return tomli_w.dumps({field.name: _toml_table(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)})


def _toml_table(table: Any) -> dict[str, Any]:
    values = {field: getattr(table, field.name) for field in dataclasses.fields(table)}
    return {
        field.name: "" if value is None else value
        for field, value in values.items()
        if value is not None or field.default is not None
    }


def _refuse_unknown(values: dict[str, Any], cls: type, where: str, prefix: str = "") -> None:
    types = typing.get_type_hints(cls)
    for name, value in values.items():
        if name not in types:
            raise NapkinError(f"'{where}': unknown field '{prefix}{name}': {suggestion(name, types, prefix=prefix)}")
        if dataclasses.is_dataclass(types[name]) and isinstance(value, dict):
            _refuse_unknown(value, types[name], where, f"{prefix}{name}.")
