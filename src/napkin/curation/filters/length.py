"""The stage `length`: documents within bounds."""

from dataclasses import dataclass
from typing import ClassVar

from napkin.curation.stage import Dropped, Record
from napkin.errors import NapkinError


@dataclass(frozen=True)
class Length:
    """Drop documents that have too few or too many characters, white space at both ends not counted."""

    name: ClassVar[str] = "length"

    least: int = 1
    """Characters that a document has at least."""
    most: int | None = None
    """Characters that a document has at most; None is any number."""

    def __post_init__(self) -> None:
        if self.least < 0:
            raise NapkinError(f"least is {self.least}: use 0 or more characters")
        if self.most is not None and self.most < self.least:
            raise NapkinError(f"most is {self.most} characters, least is {self.least}: use a larger `most`")

    def apply(self, record: Record) -> Record | Dropped:
        """The record, if it is within the bounds."""
        n = len(record.text.strip())
        if n < self.least:
            return Dropped("too short", f"{n} < {self.least} characters")
        if self.most is not None and n > self.most:
            return Dropped("too long", f"{n} > {self.most} characters")
        return record
