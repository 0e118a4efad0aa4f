"""`napkin recipe`."""

import sys
from dataclasses import dataclass

from napkin.cli.recipes import RecipeOptions, parse_with_recipe
from napkin.training.recipe import format_recipe


@dataclass(frozen=True)
class PrintOptions(RecipeOptions):
    """Print a recipe as TOML: the defaults, or a file's, with the options given here: napkin recipe > recipe.toml"""


def main(arguments: list[str]) -> None:
    """Print a recipe as TOML."""
    options, _ = parse_with_recipe(PrintOptions, "recipe", arguments)
    sys.stdout.write(format_recipe(options.recipe))
