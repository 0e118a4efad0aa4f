"""A recipe from the command line: a TOML file, and an option for each field to override it.

A sweep gives some fields several values.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import tyro

from napkin.cli.commands import Main
from napkin.cli.common.options import INLINED, parse, takes
from napkin.cli.common.terminal import notify
from napkin.errors import NapkinError
from napkin.hardware.cluster import find_cluster
from napkin.model.config import ModelConfig, preset
from napkin.recipe.foreign import ForeignRun, read_foreign
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
class ForeignFiles:
    """For commands that only count and plan."""

    files: Annotated[tuple[str, ...], tyro.conf.arg(name="from"), tyro.conf.UseAppendAction] = ()
    """Another stack's file in place of a recipe: axolotl's or verl's YAML, TrainingArguments, accelerate's YAML,
    DeepSpeed's JSON, torchtitan's TOML, a script with Megatron-LM's arguments. Twice for arguments and launcher."""


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """For commands whose run is as long as its tokens."""

    tokens: str | None = None
    """Tokens to train on in all, repeated ones included, as 300B or 1T: in place of --training.steps."""


Options = TypeVar("Options", bound=RecipeOptions)


@dataclass(frozen=True)
class RecipeSource:
    """The source of a recipe: a file, and options that override it."""

    path: str | None
    """The file; None where the defaults are meant."""
    options: tuple[str, ...]
    """The arguments without the file."""
    foreign: ForeignRun | None = None
    """The settings that another stack's files give in place of a recipe's."""

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
        in_foreign = set() if self.foreign is None else self.foreign.given
        return in_file | in_foreign | _options_given(self.options)


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
    if issubclass(options, ForeignFiles) and (files := _values_of("--from", source.options)):
        foreign = read_foreign(files, recipe, ranks=_devices_named(_value_of("--on", source.options)))
        source, recipe = dataclasses.replace(source, foreign=foreign), foreign.recipe
    given = _options_given(source.options)
    steps = _value_of("--training.steps", source.options) or ""
    if steps.isdecimal() and len(steps) < 16 and int(steps) > 0 and not SCHEDULE_FIELDS & given:
        recipe = recipe.with_steps(int(steps))
    parsed = parse(options, f"{command} [RECIPE.toml]", source.options, default=options(recipe))
    if isinstance(parsed, TokenBudget) and parsed.tokens is not None:
        if "training.steps" in given:
            raise NapkinError("--tokens and --training.steps both say how long the run is: give one of them")
        parsed = dataclasses.replace(parsed, recipe=with_tokens(parsed.recipe, parsed.tokens))
    if source.foreign is not None:
        parsed = _on_all_ranks(parsed, source.foreign)
        _tell(source.foreign)
    return parsed, source


def _tell(run: ForeignRun) -> None:
    """Say what was understood of another stack's files, and what was not."""
    choices = ", ".join(
        f"{each.setting} {_short(each.value)} is {each.field} {_short(each.means)}" for each in run.understood
    )
    notify(f"{run.stack}: {choices}")
    for note in run.notes:
        notify(f"not quite the same: {note}")
    if run.ignored:
        notify(f"without a part in the plan: {', '.join(run.ignored)}")


def _short(value: Any) -> str:
    if isinstance(value, ModelConfig):
        return f"of {value.n_layers} layers, d_model {value.d_model:,}"
    return str(value) if len(str(value)) < 60 else f"{str(value)[:57]}..."


def _on_all_ranks(options: Options, run: ForeignRun) -> Options:
    """A plan's options with as many devices as the files say, where --on names one device."""
    values = vars(options)
    if "on" not in values or run.ranks is None:
        return options
    on: str | None = values["on"]
    if on is None and run.ranks > 1:
        raise NapkinError(f"the files are of a run on {run.ranks} devices: say of which kind, as in --on H100")
    if on is not None and _devices_named(on) is None:
        return dataclasses.replace(options, on=f"{run.ranks}x{on}")
    return options


def _devices_named(on: str | None) -> int | None:
    """The number of devices that --on names; None for one without a number, and where nothing is named."""
    if on is None:
        return None
    n_devices = find_cluster(on).n_devices
    return None if n_devices == 1 and not re.match(r"\s*[0-9]+\s*[x×]", on) else n_devices


def base_recipe(source: RecipeSource, preset_name: str | None) -> Recipe:
    """The recipe that options override: that of the file or the defaults, with the model of a preset."""
    recipe = Recipe() if source.path is None else read_recipe(source.path)
    return recipe if preset_name is None else dataclasses.replace(recipe, model=preset(preset_name))


def with_tokens(recipe: Recipe, tokens: str) -> Recipe:
    """The recipe with as many steps as it takes to train on that many tokens, such as "300B"."""
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
    return next(iter(_values_of(option, arguments)), None)


def _values_of(option: str, arguments: Sequence[str]) -> list[str]:
    """The values of an option that may be given several times."""
    values = []
    for argument, following in pairwise([*arguments, None]):
        name, equals, value = (argument or "").partition("=")
        if name == option and (equals or following is not None):
            values.append(value if equals else following or "")
    return values


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
