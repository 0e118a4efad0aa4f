"""An axis of a sweep: a field of the recipe, and the values that it takes: 64,128,256, or a range 1e-4..1e-2."""

import dataclasses
import math
import random
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from napkin.errors import NapkinError
from napkin.near_names import near_names
from napkin.recipe.recipe import Recipe

Value = str | int | float | bool | None

_DIGITS = 4
"""Significant digits of a number that is drawn: the run's name then says all of it."""


@dataclass(frozen=True)
class Axis:
    """A field, and its values in their order."""

    field: str
    """As "model.d_model"."""
    values: tuple[Value, ...] = ()
    bounds: tuple[float, float] | None = None
    """A range that values are drawn from, uniformly in their logarithm; `values` is empty then."""
    whole: bool = False
    """Whether what is drawn is rounded to a whole number."""

    @property
    def option(self) -> str:
        """The option that names it."""
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
    tables = typing.get_type_hints(Recipe)
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
