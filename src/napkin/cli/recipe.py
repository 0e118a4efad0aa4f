"""`napkin recipe`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import tomli_w

from napkin.cli.recipe_options import RecipeOptions, parse_with_recipe
from napkin.cli.terminal import print_verbatim
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe


@dataclass(frozen=True)
class PrintOptions(RecipeOptions):
    """Print a recipe as TOML: the defaults or a file, with the options given here: napkin recipe > recipe.toml"""


def main(arguments: list[str]) -> None:
    """Print a recipe as TOML."""
    options, _ = parse_with_recipe(PrintOptions, "recipe", arguments)
    print_verbatim(with_comments(options.recipe).removesuffix("\n"))


def with_comments(recipe: Recipe) -> str:
    """A recipe as TOML; unset fields are comments, with the value that they resolve to if it is known."""
    tables = {field.name for field in dataclasses.fields(recipe)}
    blocks: list[str] = []
    for block in format_recipe(recipe).rstrip("\n").split("\n\n"):
        # A table within a table has its own block, after the other's.
        name = block.partition("]")[0].removeprefix("[")
        blocks.append("\n".join([block, *(_unset_fields(recipe, name) if name in tables else [])]))
    return "\n\n".join(blocks) + "\n"


def _unset_fields(recipe: Recipe, table: str) -> list[str]:
    values = getattr(recipe, table)
    unset = [
        field.name
        for field in dataclasses.fields(values)
        if getattr(values, field.name) is None and field.default is None
    ]
    known = {name: value for name in unset if (value := _resolved(recipe, values, name)) is not None}
    none = [name for name in unset if name not in known]
    lines = [f"# {line}" for line in tomli_w.dumps(known).splitlines()]
    return [*lines, *([f"# not set: {', '.join(none)}"] if none else [])]


def _resolved(recipe: Recipe, values: Any, name: str) -> Any:
    if values is recipe.optimizer:
        resolved = dataclasses.replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps)
        return getattr(resolved, name)
    return getattr(values, f"resolved_{name}", None)
