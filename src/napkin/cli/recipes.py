"""A recipe from the command line: a TOML file, every field of which an option overrides."""

from dataclasses import dataclass
from typing import Annotated, TypeVar

from napkin.cli.options import INLINED, parse
from napkin.training.recipe import Recipe, read_recipe


@dataclass(frozen=True)
class RecipeOptions:
    """A recipe: a TOML file, and options that override its fields."""

    recipe: Annotated[Recipe, INLINED]


Options = TypeVar("Options", bound=RecipeOptions)


def parse_with_recipe(options: type[Options], command: str, arguments: list[str]) -> tuple[Options, str | None]:
    """Read `[RECIPE.toml] [--field value ...]`; without a file, the defaults. Returns options and the file's path."""
    path = arguments[0] if arguments and not arguments[0].startswith("-") else None
    recipe = read_recipe(path) if path is not None else Recipe()
    rest = arguments if path is None else arguments[1:]
    return parse(options, f"{command} [RECIPE.toml]", rest, default=options(recipe)), path
