"""A recipe from the command line: a TOML file, and an option for each field to override it.

A sweep gives some fields several values.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

from napkin.cli.commands import Main
from napkin.cli.common.options import INLINED, parse, takes
from napkin.errors import NapkinError
from napkin.model.config import preset
from napkin.recipe.recipe import SCHEDULE_FIELDS, Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.toml_files import parse_toml
from napkin.units import parse_count


@dataclass(frozen=True)
class RecipeOptions:
    """A recipe: a TOML file, and options that override its fields."""

    FIRST: ClassVar[tuple[str, ...]] = (
        *("model.vocab-size", "model.context-length", "model.d-model", "model.n-layers", "model.n-heads"),
        *("training.steps", "training.batch-size", "training.precision"),
    )
    """The options that `--help` shows first."""

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


@dataclass(frozen=True)
class RecipeSource:
    """Where a recipe comes from: a file, and options that stand above it."""

    path: str | None
    """The file; None where the defaults are meant."""
    options: tuple[str, ...]
    """The arguments without the file."""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "RecipeSource":
        """A recipe is the first argument, unless that is an option."""
        if not arguments or arguments[0].startswith("-"):
            return cls(None, tuple(arguments))
        return cls(arguments[0], tuple(arguments[1:]))

    @property
    def arguments(self) -> list[str]:
        """All of them, as they were typed."""
        return [*([] if self.path is None else [self.path]), *self.options]

    def folder(self, ending: str = "", *, default: str = "run") -> str:
        """A folder in runs/ that is named after the recipe."""
        return str(Path("runs") / f"{Path(self.path or default).stem}{ending}")

    def given(self) -> set[str]:
        """The fields of a recipe that its file or the options say, whatever they say, as "training.batch_size"."""
        tables = {} if self.path is None else parse_toml(Path(self.path).read_text(encoding="utf-8-sig"))
        in_file = {f"{table}.{name}" for table, fields in tables.items() if isinstance(fields, dict) for name in fields}
        return in_file | _options_given(self.options)


def recipe_command(
    name: str, options: type[Options]
) -> Callable[[Callable[[Options, RecipeSource], int | None]], Main]:
    """Make a command of a function of its parsed options and of where their recipe comes from."""

    def decorate(run: Callable[[Options, RecipeSource], int | None]) -> Main:
        return takes(options)(lambda arguments: run(*parse_with_recipe(options, name, arguments)))

    return decorate


def parse_with_recipe(options: type[Options], command: str, arguments: Sequence[str]) -> tuple[Options, RecipeSource]:
    """Read `[RECIPE.toml] [--field value ...]`; without a file, the defaults."""
    source = RecipeSource.of(arguments)
    recipe = base_recipe(source, _value_of("--preset", source.options))
    given = _options_given(source.options)
    steps = _value_of("--training.steps", source.options) or ""
    if steps.isdecimal() and len(steps) < 16 and int(steps) > 0 and not SCHEDULE_FIELDS & given:
        recipe = recipe.with_steps(int(steps))
    parsed = parse(options, f"{command} [RECIPE.toml]", source.options, default=options(recipe))
    if isinstance(parsed, TokenBudget) and parsed.tokens is not None:
        if "training.steps" in given:
            raise NapkinError("--tokens and --training.steps both say how long the run is: give one of them")
        parsed = dataclasses.replace(parsed, recipe=with_tokens(parsed.recipe, parsed.tokens))
    return parsed, source


def base_recipe(source: RecipeSource, preset_name: str | None) -> Recipe:
    """The recipe that options override: that of the file or the defaults, with the model of a preset."""
    recipe = Recipe() if source.path is None else read_recipe(source.path)
    return recipe if preset_name is None else dataclasses.replace(recipe, model=preset(preset_name))


def with_tokens(recipe: Recipe, tokens: str) -> Recipe:
    """The recipe of as many steps as it takes to train on so many tokens, such as "300B"."""
    number = parse_count(tokens)
    if number < 1:
        raise NapkinError(f"--tokens is {tokens}: use a number above 0")
    return recipe.with_steps(-(-number // recipe.tokens_per_step))


def _options_given(arguments: Iterable[str]) -> set[str]:
    """The options among the arguments, named as fields."""
    names = (argument.partition("=")[0].lstrip("-") for argument in arguments if argument.startswith("--"))
    return {name.replace("-", "_") for name in names}


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """An option's value, found before the options are parsed because it decides their defaults."""
    for argument, following in pairwise([*arguments, None]):
        name, equals, value = (argument or "").partition("=")
        if name == option:
            return value if equals else following
    return None


def split_axes(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command's own arguments, and the text of each option that names a field of a recipe, as --model.d-model.

    Raises NapkinError for such an option without a value, and for one that is given twice.
    """
    tables = Recipe.__dataclass_fields__
    own: list[str] = []
    axes: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, text = argument.partition("=")
        table, dot, _ = name.removeprefix("--").partition(".")
        if not (name.startswith("--") and dot and table in tables):
            own.append(argument)
            continue
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise NapkinError(f"{name} has no value: give one, or several with commas between")
        if name.replace("_", "-") in axes:
            raise NapkinError(f"{name} is given twice: name all of its values once, with commas between")
        axes[name.replace("_", "-")] = text
    return own, axes
