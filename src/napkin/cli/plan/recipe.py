"""`napkin recipe`."""

import dataclasses
import re
import textwrap
from dataclasses import dataclass
from typing import Any

import tomli_w

from napkin.cli.common.options import field_docstrings, option_choices
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import print_verbatim
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe


@dataclass(frozen=True)
class PrintOptions(RecipeOptions):
    """Print a recipe as TOML: the defaults or a file, with the options given here: napkin recipe > recipe.toml"""


@recipe_command("recipe", PrintOptions)
def print_command(options: PrintOptions, _: RecipeSource) -> None:
    print_verbatim(with_comments(options.recipe).removesuffix("\n"))


def with_comments(recipe: Recipe) -> str:
    """A recipe as TOML, each field below a comment that says what it is; unset fields are comments, with the value that
    they resolve to if it is known."""
    tables = {field.name for field in dataclasses.fields(recipe)}
    choices = option_choices(type(recipe))
    blocks: list[str] = []
    for block in format_recipe(recipe).rstrip("\n").split("\n\n"):
        # A table within a table has its own block, after the other's.
        name = block.partition("]")[0].removeprefix("[")
        blocks.append(_explained(recipe, name, block, choices) if name in tables else block)
    return "\n\n".join(blocks) + "\n"


def _explained(recipe: Recipe, table: str, block: str, choices: dict[str, tuple[str, ...]]) -> str:
    values = getattr(recipe, table)
    heading, *lines = block.splitlines()
    entries: dict[str, list[str]] = {}
    for line in lines:
        if found := _ASSIGNMENT.match(line):
            entries[found[1]] = []
        # A list may go over several lines.
        entries[next(reversed(entries))].append(line)
    shown = [heading, *_comment((values.__doc__ or "").partition("\n\n")[0])]
    for field in dataclasses.fields(values):
        entry = entries.get(field.name) or _unset_field(recipe, values, field)
        if entry:
            text = _SENTENCE.split(field_docstrings(type(values)).get(field.name, ""))[0].rstrip(".")
            allowed = ", ".join(choices.get(f"{table}.{field.name.replace('_', '-')}", ()))
            shown += ["", *_comment(f"{text}. One of {allowed}." if allowed else f"{text}."), *entry]
    return "\n".join(shown)


_ASSIGNMENT = re.compile(r"(\w+) = ")
_SENTENCE = re.compile(r"(?<=[\w)`'])(?<!et al)\. (?=[A-Z0-9`])|\n\n")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def _unset_field(recipe: Recipe, values: Any, field: dataclasses.Field[Any]) -> list[str]:
    """The line of a field that is not set, as a comment; none for one that stands in a table of its own."""
    if getattr(values, field.name) is not None or field.default is not None:
        return []
    known = _resolved(recipe, values, field.name)
    return [f"# {field.name} is not set"] if known is None else [f"# {tomli_w.dumps({field.name: known}).rstrip()}"]


def _resolved(recipe: Recipe, values: Any, name: str) -> Any:
    if values is recipe.optimizer:
        resolved = dataclasses.replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps)
        return getattr(resolved, name)
    return getattr(values, f"resolved_{name}", None)
