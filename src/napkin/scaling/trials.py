"""The runs of a sweep: a grid, a list or a random sample of the values of its axes, each with a recipe and a name.

An axis is a field of the recipe with the values that it takes: 64,128,256, or a range 1e-4..1e-2.
"""

import dataclasses
import itertools
import math
import random
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from napkin.errors import NapkinError, near_names
from napkin.recipe.recipe import SCHEDULE_FIELDS, Recipe

Value = str | int | float | bool | None

_DIGITS = 4
"""Significant digits of a number that is drawn: the run's name then says all of it."""


@dataclass(frozen=True)
class Axis:
    """A field, and its values in their order."""

    field: str
    """The field's name, as "model.d_model"."""
    values: tuple[Value, ...] = ()
    bounds: tuple[float, float] | None = None
    """A range that values are drawn from, uniformly in their logarithm; `values` is empty then."""
    whole: bool = False
    """True if a drawn value is rounded to a whole number."""

    @property
    def option(self) -> str:
        return f"--{self.field.replace('_', '-')}"

    def draw(self, generator: random.Random) -> Value:
        """One of its values, or a number from its range."""
        if self.bounds is None:
            return generator.choice(self.values)
        low, high = self.bounds
        drawn = math.exp(generator.uniform(math.log(low), math.log(high)))
        return round(drawn) if self.whole else float(f"{drawn:.{_DIGITS}g}")


def read_axis(name: str, text: str) -> Axis:
    """Parse an option such as --model.d-model and its values, which commas separate.

    Raises NapkinError for a field that no recipe has, a value of another type, one that is given twice, a range of
    something else than positive numbers.
    """
    table, _, field = name.removeprefix("--").replace("-", "_").partition(".")
    kind = _type_of(name, table, field)
    axis = Axis(f"{table}.{field}")
    low, dots, high = text.partition("..")
    # A file's name may begin with two dots.
    if dots and low and "/" not in text:
        return _read_range(axis, kind, low, high)
    texts = [each.strip() for each in text.split(",")]
    if not all(texts):
        raise NapkinError(f"{axis.option} is '{text[:100]}', which lacks a value: use values between single commas")
    values = tuple(_read(axis, kind, each) for each in texts)
    twice = next((each for each in values if values.count(each) > 1), None)
    if twice is not None or values.count(None) > 1:
        raise NapkinError(f"{axis.option} names {twice} twice: name each value once")
    return dataclasses.replace(axis, values=values)


def _type_of(name: str, table: str, field: str) -> Any:
    hints = typing.get_type_hints(Recipe)
    tables = {each.name: hints[each.name] for each in dataclasses.fields(Recipe)}
    known = {
        f"{each}.{inner.name}".replace("_", "-"): each for each in tables for inner in dataclasses.fields(tables[each])
    }
    if f"{table}.{field}".replace("_", "-") in known:
        return typing.get_type_hints(tables[table])[field]
    given = name.removeprefix("--")
    same_field = [each for each in known if each.partition(".")[2] == given.partition(".")[2]]
    near = same_field or near_names(given, known)
    way_out = f"did you mean --{near[0]}?" if near else "`napkin recipe` prints all fields of a recipe"
    raise NapkinError(f"there is no option '{name[:100]}': {way_out}")


def _read(axis: Axis, kind: Any, text: str) -> Value:
    if axis.field == "data.train":
        return text
    members = _members(kind)
    if text == "None" and type(None) in members:
        return None
    try:
        return msgspec.convert(text.lower() if bool in members else text, kind, strict=False)
    except msgspec.ValidationError:
        raise NapkinError(f"{axis.option}: '{text[:100]}' is not {_expected(members)}") from None


def _read_range(axis: Axis, kind: Any, low: str, high: str) -> Axis:
    members = _members(kind)
    if not members & {int, float}:
        raise NapkinError(f"{axis.option} is '{low}..{high}', but its values are not numbers: list them, with commas")
    number = float if float in members else int
    bounds = tuple(_read(axis, number, each.strip()) for each in (low, high))
    begin, end = (each for each in bounds if isinstance(each, int | float))
    if not 0 < begin < end < math.inf:
        raise NapkinError(f"{axis.option} is '{low}..{high}': a range goes from a number above 0 to a larger one")
    return dataclasses.replace(axis, bounds=(float(begin), float(end)), whole=number is int)


def _members(kind: Any) -> set[Any]:
    """The types of a union, and the values of literals."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return {member for each in typing.get_args(kind) for member in _members(each)}
    return set(typing.get_args(kind)) if typing.get_origin(kind) is Literal else {kind}


def _expected(members: set[Any]) -> str:
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    kinds = [text for kind, text in names.items() if kind in members]
    literals = sorted(str(each) for each in members if isinstance(each, str))
    near = ["None"] if type(None) in members else []
    return " or ".join([*kinds, *(["one of " + ", ".join(literals)] if literals else []), *near])


MOST_RUNS = 10_000
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    """Name of its folder, made of the values in which it differs, such as "d_model=64,learning_rate=0.001"."""
    values: dict[str, Value]
    """The value of each axis, by its field."""
    recipe: Recipe


def grid(base: Recipe, axes: Sequence[Axis]) -> tuple[Trial, ...]:
    """Every combination of the values, the last axis varying fastest.

    Raises NapkinError for a range, for more than `MOST_RUNS`, and for a combination that no recipe can have.
    """
    _refuse_ranges(axes, "a grid")
    n_runs = math.prod(len(axis.values) for axis in axes)
    if n_runs > MOST_RUNS:
        raise NapkinError(f"the grid has {n_runs:,} runs, the limit is {MOST_RUNS:,}: give fewer values, or --random N")
    return _trials(base, axes, itertools.product(*(axis.values for axis in axes)))


def listed(base: Recipe, axes: Sequence[Axis]) -> tuple[Trial, ...]:
    """The first values of all axes, the second ones, and so on; an axis of one value has it in every run.

    Raises NapkinError where the axes have different numbers of values, and as `grid`.
    """
    _refuse_ranges(axes, "a list")
    lengths = {axis.option: len(axis.values) for axis in axes if len(axis.values) > 1}
    if len(set(lengths.values())) > 1:
        named = ", ".join(f"{option} has {n}" for option, n in lengths.items())
        raise NapkinError(f"a list takes the values of all options one by one, but {named}: give as many of each")
    n_runs = max(lengths.values(), default=1)
    columns = [axis.values if len(axis.values) > 1 else axis.values * n_runs for axis in axes]
    return _trials(base, axes, zip(*columns, strict=True) if columns else [()])


def sampled(base: Recipe, axes: Sequence[Axis], n_runs: int, *, seed: int) -> tuple[Trial, ...]:
    """`n_runs` different combinations, drawn at random: the same ones for the same seed, and the first ones of a larger
    sample.

    Raises NapkinError where there are not as many, and as `grid`.
    """
    if not 1 <= n_runs <= MOST_RUNS:
        raise NapkinError(f"--random is {n_runs}: use 1 to {MOST_RUNS:,} runs")
    generator = random.Random(seed)
    drawn: dict[tuple[Value, ...], None] = {}
    for _ in range(100 * n_runs):
        drawn.setdefault(tuple(axis.draw(generator) for axis in axes))
        if len(drawn) == n_runs:
            return _trials(base, axes, drawn)
    raise NapkinError(
        f"--random {n_runs} of these values found {len(drawn)} different runs: use --random {len(drawn)}, or give more "
        "values or wider ranges"
    )


def _refuse_ranges(axes: Sequence[Axis], what: str) -> None:
    for axis in axes:
        if axis.bounds is not None:
            low, high = axis.bounds
            raise NapkinError(
                f"{axis.option} is the range {low:g}..{high:g}, of which {what} has no values: list them with commas, "
                "or give --random N"
            )


def _trials(base: Recipe, axes: Sequence[Axis], combinations: Iterable[tuple[Value, ...]]) -> tuple[Trial, ...]:
    varied = [axis for axis in axes if len(axis.values) != 1]
    fields = [axis.field.partition(".")[2] for axis in varied]
    # A field's own name is enough where no other table has it too.
    labels = {
        axis.field: field if fields.count(field) == 1 else axis.field
        for axis, field in zip(varied, fields, strict=True)
    }
    trials, taken = [], set()
    for combination in combinations:
        values = dict(zip((axis.field for axis in axes), combination, strict=True))
        name = ",".join(f"{label}={_shown(values[field])}" for field, label in labels.items()) or "run"
        if len(name) > _LONGEST_NAME or name in taken:
            name = f"{name[:_LONGEST_NAME]},{len(taken) + 1}"
        taken.add(name)
        try:
            trials.append(Trial(name, values, with_values(base, values)))
        except NapkinError as error:
            raise NapkinError(f"the run {name} is impossible: {error}") from None
    return tuple(trials)


def with_values(base: Recipe, values: Mapping[str, Value]) -> Recipe:
    """The recipe with other values of fields that are named as "model.d_model"; where fewer steps are too few for its
    schedule, that is shorter too, unless it is among the values. Raises NapkinError as `Recipe` does."""
    steps = values.get("training.steps")
    if isinstance(steps, int) and steps > 0 and not SCHEDULE_FIELDS & values.keys():
        base = base.with_steps(steps)
    tables: dict[str, dict[str, Value]] = {}
    for field, value in values.items():
        table, _, name = field.partition(".")
        tables.setdefault(table, {})[name] = value
    changed = {table: dataclasses.replace(getattr(base, table), **fields) for table, fields in tables.items()}
    return dataclasses.replace(base, **changed)


def _shown(value: Value) -> str:
    """A value as a part of a folder's name: no character in it needs quoting, and none is a slash."""
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return re.sub(r"[^\w.+-]", "-", text)
