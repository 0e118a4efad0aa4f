"""A recipe from the command line: a TOML file, and an option for each field to override it."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

from napkin.cli.options import INLINED, parse
from napkin.errors import NapkinError
from napkin.model.published_models import preset
from napkin.recipe.recipe import SCHEDULE_FIELDS, Recipe
from napkin.recipe.toml_file import parse_toml, read_recipe
from napkin.units import parse_count


@dataclass(frozen=True)
class RecipeOptions:
    """A recipe: a TOML file, and options that override its fields."""

    FIRST: ClassVar[tuple[str, ...]] = (
        *("model.vocab-size", "model.context-length", "model.d-model", "model.n-layers", "model.n-heads"),
        *("training.steps", "training.batch-size", "training.precision"),
    )
    """What `--help` shows first."""

    recipe: Annotated[Recipe, INLINED]
    preset: str | None = None
    """A published model to start from, whose fields the options override: gpt2, llama-3-8b, mixtral-8x7b;
    an unknown name lists all."""


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """For commands whose run is as long as its tokens."""

    tokens: str | None = None
    """Tokens to train on in all, repeated ones included, as 300B or 1T: in place of --training.steps."""


Options = TypeVar("Options", bound=RecipeOptions)


def parse_with_recipe(options: type[Options], command: str, arguments: list[str]) -> tuple[Options, str | None]:
    """Read `[RECIPE.toml] [--field value ...]`; without a file, the defaults. Returns options and the file's path."""
    path = arguments[0] if arguments and not arguments[0].startswith("-") else None
    recipe = read_recipe(path) if path is not None else Recipe()
    rest = arguments if path is None else arguments[1:]
    name = _value_of("--preset", rest)
    if name is not None:
        recipe = dataclasses.replace(recipe, model=preset(name))
    given = options_given(rest)
    steps = _value_of("--training.steps", rest) or ""
    if steps.isdecimal() and len(steps) < 16 and int(steps) > 0 and not SCHEDULE_FIELDS & given:
        recipe = recipe.with_steps(int(steps))
    parsed = parse(options, f"{command} [RECIPE.toml]", rest, default=options(recipe))
    if isinstance(parsed, TokenBudget) and parsed.tokens is not None:
        if "training.steps" in given:
            raise NapkinError("--tokens and --training.steps both say how long the run is: give one of them")
        parsed = dataclasses.replace(parsed, recipe=with_tokens(parsed.recipe, parsed.tokens))
    return parsed, path


def with_tokens(recipe: Recipe, tokens: str) -> Recipe:
    """The recipe of as many steps as it takes to train on so many tokens, such as "300B"."""
    number = parse_count(tokens)
    if number < 1:
        raise NapkinError(f"--tokens is {tokens}: use a number above 0")
    return recipe.with_steps(-(-number // recipe.tokens_per_step))


def options_given(arguments: Iterable[str]) -> set[str]:
    """The options among the arguments, named as fields: "training.batch_size"."""
    names = (argument.partition("=")[0].lstrip("-") for argument in arguments if argument.startswith("--"))
    return {name.replace("-", "_") for name in names}


def fields_given(path: str | None, arguments: Iterable[str]) -> set[str]:
    """The fields of a recipe that its file or the options say, whatever they say."""
    given = options_given(arguments)
    tables = {} if path is None else parse_toml(Path(path).read_text(encoding="utf-8-sig"))
    for table, fields in tables.items():
        given |= {f"{table}.{name}" for name in fields} if isinstance(fields, dict) else set()
    return given


def _value_of(option: str, arguments: list[str]) -> str | None:
    """An option's value, found before the options are parsed because it decides their defaults."""
    for argument, following in pairwise([*arguments, None]):
        name, equals, value = (argument or "").partition("=")
        if name == option:
            return value if equals else following
    return None
