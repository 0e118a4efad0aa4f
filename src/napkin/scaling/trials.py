"""The runs of a sweep: a grid, a list or a random sample of the values of its axes, each with a recipe and a name."""

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from napkin.errors import NapkinError
from napkin.recipe.recipe import SCHEDULE_FIELDS, Recipe
from napkin.scaling.axis import Axis, Value

MOST_RUNS = 10_000
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    """Of its folder: what sets it apart from the others, as "d_model=64,learning_rate=0.001"."""
    values: dict[str, Value]
    """Of each axis, by its field."""
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
