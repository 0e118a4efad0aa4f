"""The step of a foreign trainer that takes most memory, by the lengths of all batches in the order of the run.

The order comes from a copy of the trainer's own batch sampler, whose seed is known; the shapes of the first step's
batches confirm that it is the run's order. The rows of the steps in question are collated by the trainer's own
collator, and their step is counted as the first one was.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from napkin.errors import NapkinError
from napkin.hooks.fake_step import random_states_kept, signature_of
from napkin.planning.step.longest_step import LongestStep, Sizes, find_longest, largest_that

MOST_ROWS = 50_000
"""The most rows of a data set whose lengths are read: those of the first steps."""

MicroBatches = list[list[int]]
"""The numbers of the rows of a step, by micro-batch."""


class LongestBatch:
    """The batches of a trainer's run; `loader` is its data loader, and `count` gives a step's peak."""

    def __init__(self, loader: Any, *, per_step: int, n_steps: int, count: Callable[[Sequence[Any]], int]) -> None:
        self.data, self.collate, self.count = loader.dataset, loader.collate_fn, count
        self._lengths: dict[int, int] = {}
        with random_states_kept():
            self.steps = _steps_of(loader, per_step, n_steps)

    def is_order_of(self, drawn: Sequence[Any]) -> bool:
        """True if the first step has the shapes of these batches."""
        if not self.steps or len(self.steps[0]) != len(drawn):
            return False
        return [*map(signature_of, self._collated(self.steps[0]))] == [*map(signature_of, drawn)]

    def find(self, step_bytes: int, first_peak: int) -> LongestStep | None:
        """The step that takes most, and the first that `step_bytes` are not enough for; None where all are alike.

        `first_peak` is the peak of the first step, which was counted.
        """
        sizes = [self._sizes(step) for step in self.steps]
        if len(set(sizes)) < 2:
            return None
        return find_longest(
            sizes,
            lambda number: self.count(self._collated(self.steps[number])),
            self._shape,
            step_bytes=step_bytes,
            known={0: first_peak},
            way_out=lambda number: self._way_out(number, step_bytes),
        )

    def _collated(self, step: MicroBatches, *, most_tokens: int | None = None) -> list[Any]:
        with random_states_kept():
            return [self.collate([_cut(self.data[row], most_tokens) for row in rows]) for rows in step]

    def _length(self, row: int) -> int:
        if row not in self._lengths:
            self._lengths[row] = length_of_row(self.data[row])
        return self._lengths[row]

    def _sizes(self, step: MicroBatches) -> Sizes:
        """Number of tokens that the bytes of a step grow with, for padded and for packed rows."""
        lengths = [[self._length(row) for row in rows] for rows in step]
        sizes = [(len(each) * max(each), len(each) * max(each) ** 2, sum(each)) for each in lengths]
        # From the second micro-batch on, gradients exist.
        later = [(0, 0, 0), *sizes[1:]]
        return (*map(max, zip(*sizes, strict=True)), *map(max, zip(*later, strict=True)))

    def _largest(self, number: int) -> list[int]:
        """The rows of a step's largest micro-batch, the longest first."""
        rows = max(self.steps[number], key=lambda rows: len(rows) * max(map(self._length, rows)))
        return sorted(rows, key=lambda row: -self._length(row))

    def _shape(self, number: int) -> str:
        rows = self._largest(number)
        return f"{len(rows)} × {self._length(rows[0]):,} tokens"

    def _way_out(self, number: int, step_bytes: int) -> str:
        rows, step = self._largest(number), self.steps[number]
        # With several micro-batches, the earlier ones have left gradients.
        others = [[self._largest(number)[-1]]] if len(step) > 1 else []

        def fits(rows: list[int], most_tokens: int | None = None) -> bool:
            return self.count(self._collated([*others, rows], most_tokens=most_tokens)) <= step_bytes

        ways = []
        if len(rows) > 1:
            n = largest_that(lambda n: fits(rows[:n]), 1, len(rows))
            ways += [f"a micro-batch of {n}"] * bool(n)
        length = largest_that(lambda length: fits(rows, length), 8, self._length(rows[0]))
        ways += [f"a length of {length:,}"] * bool(length)
        return f"{' or '.join(ways)} would fit" if ways else "no micro-batch and no length would fit"


def length_of_row(row: Any) -> int:
    """Tokens of a row of a data set. Raises NapkinError where it has none, as a text that is not encoded yet."""
    if isinstance(row, Mapping):
        lengths = [len(value) for name, value in row.items() if name.endswith("ids") and hasattr(value, "__len__")]
        if lengths:
            return sum(lengths)
    raise NapkinError("the rows of the data set have no token ids")


def _cut(row: Any, most_tokens: int | None) -> Any:
    if most_tokens is None or not isinstance(row, Mapping):
        return row
    return {
        name: value if isinstance(value, str) or not hasattr(value, "__len__") else value[:most_tokens]
        for name, value in row.items()
    }


def _steps_of(loader: Any, per_step: int, n_steps: int) -> list[MicroBatches]:
    """The rows of the first steps, epoch by epoch."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or not hasattr(loader.dataset, "__len__"):
        raise NapkinError("the data are a stream, whose lengths are not known")
    # The run's own sampler is not advanced; its data are not copied.
    sampler = copy.deepcopy(batches, {id(loader.dataset): loader.dataset})
    steps: list[MicroBatches] = []
    seen = 0
    while len(steps) < n_steps and seen < MOST_ROWS:
        before = len(steps)
        for step in _grouped(sampler, per_step):
            steps.append(step)
            seen += sum(map(len, step))
            if len(steps) >= n_steps or seen >= MOST_ROWS:
                break
        if len(steps) == before:
            break
    return steps


def _grouped(batches: Any, size: int) -> Iterator[MicroBatches]:
    group: MicroBatches = []
    for rows in batches:
        group.append([int(row) for row in rows])
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
