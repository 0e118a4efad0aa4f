"""Examples that are made when they are asked for: only those of a batch are in memory, however many there are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from napkin.chats.token_sequence import Example

EXAMPLES_PER_CHUNK = 256
"""Of a pass over all units."""


class LazyExamples(Sequence[Example], ABC):
    """A sequence of units by their numbers."""

    @abstractmethod
    def example(self, number: int) -> Example:
        """The unit of a number from 0 on."""

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        """Raises IndexError for a unit that does not exist."""
        numbers = range(len(self))[index]
        return self.example(numbers) if isinstance(numbers, int) else [self.example(number) for number in numbers]


class MappedExamples(LazyExamples):
    """What a function makes of each of other units."""

    def __init__(self, examples: Sequence[Example], function: Callable[[Example], Example]) -> None:
        self._units, self._function = examples, function

    def __len__(self) -> int:
        return len(self._units)

    def example(self, number: int) -> Example:
        """That of the function."""
        return self._function(self._units[number])


def chunks_of(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    """All units, `EXAMPLES_PER_CHUNK`."""
    for begin in range(0, len(examples), EXAMPLES_PER_CHUNK):
        yield examples[begin : begin + EXAMPLES_PER_CHUNK]


def tokens_of(examples: Sequence[Example], most: int = 1000) -> int:
    """How many tokens units have; of more than `most`, as many as that many have, evenly spread."""
    n = min(len(examples), most)
    chosen = (examples[number * len(examples) // n] for number in range(n))
    return round(sum(len(sequence.tokens) for example in chosen for sequence in example) * len(examples) / max(n, 1))
