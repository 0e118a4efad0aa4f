"""Examples that are made when they are asked for: only those of a batch are in memory, however many there are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from napkin.chats.token_sequence import Unit

UNITS_AT_A_TIME = 256
"""Of a pass over all units."""


class LazyUnits(Sequence[Unit], ABC):
    """A sequence of units by their numbers."""

    @abstractmethod
    def unit(self, number: int) -> Unit:
        """The unit of a number from 0 on."""

    @overload
    def __getitem__(self, index: int) -> Unit: ...
    @overload
    def __getitem__(self, index: slice) -> list[Unit]: ...
    def __getitem__(self, index: int | slice) -> Unit | list[Unit]:
        """Raises IndexError for a unit that does not exist."""
        numbers = range(len(self))[index]
        return self.unit(numbers) if isinstance(numbers, int) else [self.unit(number) for number in numbers]


class MappedUnits(LazyUnits):
    """What a function makes of each of other units."""

    def __init__(self, units: Sequence[Unit], function: Callable[[Unit], Unit]) -> None:
        self._units, self._function = units, function

    def __len__(self) -> int:
        return len(self._units)

    def unit(self, number: int) -> Unit:
        """That of the function."""
        return self._function(self._units[number])


def chunks_of(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    """All units, `UNITS_AT_A_TIME`."""
    for begin in range(0, len(units), UNITS_AT_A_TIME):
        yield units[begin : begin + UNITS_AT_A_TIME]


def tokens_of(units: Sequence[Unit], most: int = 1000) -> int:
    """How many tokens units have; of more than `most`, as many as that many have, evenly spread."""
    n = min(len(units), most)
    chosen = (units[number * len(units) // n] for number in range(n))
    return round(sum(len(sequence.tokens) for unit in chosen for sequence in unit) * len(units) / max(n, 1))
