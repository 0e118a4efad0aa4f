"""`napkin recipe`."""

import dataclasses
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
    # With the optimizer's own numbers in it: a file to change them in.
    recipe = dataclasses.replace(options.recipe, optimizer=options.recipe.optimizer.resolved)
    sys.stdout.write(format_recipe(recipe))
