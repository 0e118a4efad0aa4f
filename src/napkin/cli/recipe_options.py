"""A recipe from the command line: a TOML file, and an option for each field to override it."""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, TypeVar

from napkin.cli.options import INLINED, parse
from napkin.model.published_models import preset
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe


@dataclass(frozen=True)
class RecipeOptions:
    """A recipe: a TOML file, and options that override its fields."""

    recipe: Annotated[Recipe, INLINED]
    preset: str | None = None
    """A published model to start from, whose fields the options override: gpt2, llama-3-8b, mixtral-8x7b;
    an unknown name lists all."""


Options = TypeVar("Options", bound=RecipeOptions)


def parse_with_recipe(options: type[Options], command: str, arguments: list[str]) -> tuple[Options, str | None]:
    """Read `[RECIPE.toml] [--field value ...]`; without a file, the defaults. Returns options and the file's path."""
    path = arguments[0] if arguments and not arguments[0].startswith("-") else None
    recipe = read_recipe(path) if path is not None else Recipe()
    rest = arguments if path is None else arguments[1:]
    name = _value_of("--preset", rest)
    if name is not None:
        recipe = dataclasses.replace(recipe, model=preset(name))
    return parse(options, f"{command} [RECIPE.toml]", rest, default=options(recipe)), path


def _value_of(option: str, arguments: list[str]) -> str | None:
    """An option's value, found before the options are parsed because it decides their defaults."""
    for argument, following in pairwise([*arguments, None]):
        name, equals, value = (argument or "").partition("=")
        if name == option:
            return value if equals else following
    return None
