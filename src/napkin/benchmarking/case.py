"""One thing that is timed: a shape of a target, in a form, a precision and a pass, compiled or not, cold or warm."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from napkin.accounting.ledger import Ledger
from napkin.benchmarking.shapes import Shape
from napkin.benchmarking.subject import Subject
from napkin.benchmarking.work import Pass
from napkin.recipe.precision import Precision


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    shape: Shape = field(hash=False)
    """All dimensions with their sizes."""
    form: str
    precision: Precision
    timed: Pass
    compiled: bool = False
    cold: bool = False

    @property
    def name(self) -> str:
        """The name of its form, and whether that is compiled."""
        return f"{self.form}+compiled" if self.compiled else self.form


class Target(ABC):
    """An operator or a module that can be timed."""

    dimensions: Sequence[str]
    named_sizes: Mapping[str, Mapping[str, Shape]] = {}
    """Dimensions whose values are names, which stand for several dimensions."""
    forms: Sequence[str]
    passes: Sequence[Pass]
    shapes: Sequence[Shape]
    """The shapes that are timed where none is named."""
    sweep: Sequence[Shape]

    @abstractmethod
    def whole(self, shape: Shape) -> dict[str, int]:
        """A shape with the dimensions that it does not name."""

    @abstractmethod
    def usual_forms(self, shape: Shape, precision: Precision) -> Sequence[str]:
        """The forms of a whole shape that are timed where none is named."""

    @abstractmethod
    def ledger(self, case: Case) -> Ledger:
        """The step that a case is a pass of, counted without allocating anything."""

    @abstractmethod
    def subject(self, case: Case) -> Subject:
        """The real thing, on the device of the case's precision."""
