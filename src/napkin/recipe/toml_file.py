"""Recipes as TOML files: errors are reported by field when reading, and every field is written."""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from napkin.errors import NapkinError, suggestion
from napkin.files import StrPath
from napkin.recipe.recipe import Recipe
from napkin.recipe.tuning_recipe import RECIPE_OF
from napkin.toml_files import read_toml


def read_recipe(path: StrPath) -> Recipe:
    """Read a recipe from a TOML file; fields that are not in it keep their defaults.

    Raises NapkinError for a missing file, TOML that cannot be read, an unknown field, a value of the wrong type or
    outside its range.
    """
    path = Path(path)
    values = read_toml(path, "a recipe, a TOML file as `napkin recipe` prints it")
    if is_program(values):
        raise NapkinError(
            f"'{path}' is of a program that napkin watched, which has its model, data and checkpoints to itself: "
            f"`napkin runs {path.parent}` and `napkin report {path.parent}` read this run, the program itself resumes, "
            "evaluates and generates"
        )
    return recipe_of_values(values, str(path))


def recipe_of_values(values: dict[str, Any], where: str) -> Recipe:
    """A recipe of tables and fields, as a TOML file has them; `where` names what they came from, for errors.

    Raises NapkinError for an unknown field, a value of the wrong type or outside its range.
    """
    kind = recipe_class(values, where)
    _refuse_unknown(values, kind, where)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise NapkinError(
            f"'{where}': {str(error).replace('`$.', '`')}: `napkin train --help all` lists the types"
        ) from None
    except NapkinError as error:
        raise NapkinError(f"'{where}': {error}") from None


def is_program(values: Mapping[str, Any]) -> bool:
    """True for what a program that napkin watches says of itself, in place of a recipe."""
    return set(values) == {"program"}


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


def format_recipe(recipe: Recipe, *, only: Collection[str] | None = None) -> str:
    """A recipe as TOML with every field; None, which TOML does not have, is left out where it is the default.

    `only` are the fields to write, such as "training.steps", those that it has. What differs from the default of a
    table that is in a file stands beside them, so that the text is of the same recipe.
    """
    names = [field.name for field in dataclasses.fields(recipe)]
    if only is None:
        return tomli_w.dumps({name: _toml_table(getattr(recipe, name)) for name in names})
    return tomli_w.dumps(
        {
            name: _chosen(
                getattr(recipe, name), {each.partition(".")[2] for each in only if each.startswith(f"{name}.")}
            )
            for name in dict.fromkeys(each.partition(".")[0] for each in only)
            if name in names
        }
    )


def _chosen(table: Any, fields: Collection[str]) -> dict[str, Any]:
    default, values = type(table)(), vars(table)
    kept = {name: value for name, value in values.items() if name in fields or value != getattr(default, name)}
    return {name: "" if value is None else value for name, value in kept.items()}


def _toml_table(table: Any) -> dict[str, Any]:
    values = {field: getattr(table, field.name) for field in dataclasses.fields(table)}
    return {
        field.name: "" if value is None else value
        for field, value in values.items()
        if value is not None or field.default is not None
    }


def _refuse_unknown(values: dict[str, Any], cls: type, where: str, prefix: str = "") -> None:
    hints = typing.get_type_hints(cls)
    types = {each.name: hints[each.name] for each in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in types:
            raise NapkinError(f"'{where}': unknown field '{prefix}{name}': {suggestion(name, types, prefix=prefix)}")
        if dataclasses.is_dataclass(types[name]) and isinstance(value, dict):
            _refuse_unknown(value, types[name], where, f"{prefix}{name}.")
