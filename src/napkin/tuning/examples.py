"""Examples that are made when they are asked for: only those of a batch are in memory, however many there are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from napkin.chats.token_sequence import Example

EXAMPLES_PER_CHUNK = 256
"""Examples in memory at a time, where a pass goes over all of them."""


class LazyExamples(Sequence[Example], ABC):
    """Examples that a subclass makes by their number when they are asked for."""

    @abstractmethod
    def example(self, number: int) -> Example: ...

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        numbers = range(len(self))[index]
        return self.example(numbers) if isinstance(numbers, int) else [self.example(number) for number in numbers]


class MappedExamples(LazyExamples):
    """The results of a function on other examples."""

    def __init__(self, examples: Sequence[Example], function: Callable[[Example], Example]) -> None:
        self._units, self._function = examples, function

    def __len__(self) -> int:
        return len(self._units)

    def example(self, number: int) -> Example:
        return self._function(self._units[number])


def chunks_of(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    """Yield all examples in slices of `EXAMPLES_PER_CHUNK`."""
    for begin in range(0, len(examples), EXAMPLES_PER_CHUNK):
        yield examples[begin : begin + EXAMPLES_PER_CHUNK]


def tokens_of(examples: Sequence[Example], most: int = 1000) -> int:
    """Count the tokens of examples; beyond `most` examples, estimate them from that many, evenly spread."""
    n = min(len(examples), most)
    chosen = (examples[number * len(examples) // n] for number in range(n))
    return round(sum(len(sequence.tokens) for example in chosen for sequence in example) * len(examples) / max(n, 1))
