"""`napkin recipe`."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import tomli_w

from napkin.cli.recipe_options import RecipeOptions, parse_with_recipe
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe


@dataclass(frozen=True)
class PrintOptions(RecipeOptions):
    """Print a recipe as TOML: the defaults, or a file's, with the options given here: napkin recipe > recipe.toml"""


def main(arguments: list[str]) -> None:
    """Print a recipe as TOML."""
    options, _ = parse_with_recipe(PrintOptions, "recipe", arguments)
    sys.stdout.write(with_comments(options.recipe))


def with_comments(recipe: Recipe) -> str:
    """A recipe as TOML, and as comments the fields that are left out, with what they come to where that is known."""
    tables = {field.name for field in dataclasses.fields(recipe)}
    blocks: list[str] = []
    for block in format_recipe(recipe).rstrip("\n").split("\n\n"):
        # A table within a table has a block of its own, behind the other's.
        name = block.partition("]")[0].removeprefix("[")
        blocks.append("\n".join([block, *(_left_out(recipe, name) if name in tables else [])]))
    return "\n\n".join(blocks) + "\n"


def _left_out(recipe: Recipe, table: str) -> list[str]:
    values = getattr(recipe, table)
    left_out = [
        field.name
        for field in dataclasses.fields(values)
        if getattr(values, field.name) is None and field.default is None
    ]
    known = {name: value for name in left_out if (value := _resolved(recipe, values, name)) is not None}
    none = [name for name in left_out if name not in known]
    lines = [f"# {line}" for line in tomli_w.dumps(known).splitlines()]
    return [*lines, *([f"# not set: {', '.join(none)}"] if none else [])]


def _resolved(recipe: Recipe, values: Any, name: str) -> Any:
    if values is recipe.optimizer:
        resolved = dataclasses.replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps)
        return getattr(resolved, name)
    return getattr(values, f"resolved_{name}", None)
