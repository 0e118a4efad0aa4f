"""The smallest and the largest value of a number that a user chooses, declared at the field that it bounds.

    steps: Annotated[int, Bounds(1, 10**12)] = 1000

Values outside are typing errors, or overflow the sizes of tensors. `refuse_outside` reads the bounds when a value is
set, and `--help` shows them.
"""

import dataclasses
from functools import cache
from typing import Any

from napkin.errors import NapkinError

MOST_STEPS = 10**12
LARGEST_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Both ends are allowed, and so is None where the field's type has it; words such as "auto" are not compared."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least} to {self.most}"


@cache
def bounds_of(cls: type) -> dict[str, Bounds]:
    """The bounds of a dataclass's fields, by name."""
    marks = {field.name: getattr(field.type, "__metadata__", ()) for field in dataclasses.fields(cls)}
    return {name: mark for name, found in marks.items() for mark in found if isinstance(mark, Bounds)}


def refuse_outside(table: str, values: Any) -> None:
    """Raise NapkinError for a field of `values`, the recipe's `table`, that is outside its bounds."""
    for name, bounds in bounds_of(type(values)).items():
        value = getattr(values, name)
        # A negated comparison catches NaN too.
        if isinstance(value, int | float) and not bounds.least <= value <= bounds.most:
            raise NapkinError(f"{table}.{name} is {value}: use {bounds}")
