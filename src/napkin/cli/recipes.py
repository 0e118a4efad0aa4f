"""A recipe from the command line: a TOML file, every field of which an option overrides."""

from dataclasses import dataclass
from typing import Annotated, TypeVar

import tyro

from napkin.cli.terminal import parse
from napkin.training.recipe import Recipe, read_recipe


@dataclass(frozen=True)
class RecipeOptions:
    """A recipe: a TOML file, and options that override its fields."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]


Options = TypeVar("Options", bound=RecipeOptions)


def parse_with_recipe(options: type[Options], command: str, arguments: list[str]) -> tuple[Options, str | None]:
    """Read `[RECIPE.toml] [--field value ...]`; without a file, the defaults. Returns options and the file's path."""
    path = arguments[0] if arguments and not arguments[0].startswith("-") else None
    recipe = read_recipe(path) if path else Recipe()
    rest = arguments[1:] if path else arguments
    return parse(options, f"{command} [RECIPE.toml]", rest, default=options(recipe)), path
