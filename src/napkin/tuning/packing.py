"""Sequences in rows, rows in micro-batches: padded to one length, or packed one after the other.

Training does not depend on it: a packed sequence sees itself alone, padding is never a target, and each
micro-batch's loss is a part of one sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.distributed.pipeline_stages import PackedRows
from napkin.errors import NapkinError
from napkin.tensors import sent_to

Packing = Literal["packed", "bucketed", "padded", "padded left"]
"""Several sequences per row, masked from each other, in rows of any length or in few shapes; or one per row, with
padding after or before it."""

WIDTHS, HEIGHTS = 2, 4
"""Lengths of rows with "bucketed", and numbers of rows of each: each is twice the one before. On conversations of
lognormal lengths these have less padding than other products up to eight."""

PADDING = 0
"""The id that fills rows; any would do, since no token attends to it."""


@dataclass(frozen=True, eq=False)
class SequenceMicroBatch:
    """Examples of a batch in rows, and the place of each token that is trained on."""

    rows: PackedRows
    examples: tuple[Example, ...]
    example_numbers: tuple[int, ...]
    """The number of each example in the batch."""
    sequence: Int[Tensor, " token"]
    """The number of each trained token's sequence, among the sequences of all examples in order."""
    example: Int[Tensor, " sequence"]
    """The number of each sequence's example in this micro-batch."""
    values: Mapping[str, Float[Tensor, " token"]]
    """`TokenSequence.values` of all sequences, concatenated."""

    @property
    def sequences(self) -> list[TokenSequence]:
        return [sequence for example in self.examples for sequence in example]

    @property
    def n_sequences(self) -> int:
        return len(self.example)

    def with_coefficients(self, coefficients: Float[Tensor, " token"]) -> "SequenceMicroBatch":
        """Add the loss's gradient with respect to each log-probability."""
        return replace(self, rows=replace(self.rows, coefficients=coefficients))

    def to(self, device: str | torch.device) -> "SequenceMicroBatch":
        rows = replace(
            self.rows,
            inputs=sent_to(device, self.rows.inputs),
            documents=None if self.rows.documents is None else sent_to(device, self.rows.documents),
            places=sent_to(device, self.rows.places),
            targets=sent_to(device, self.rows.targets),
        )
        values = {name: sent_to(device, value) for name, value in self.values.items()}
        sequence, example = sent_to(device, self.sequence), sent_to(device, self.example)
        return replace(self, rows=rows, sequence=sequence, example=example, values=values)


def resolved_packing(chosen: Literal["auto", "packed", "bucketed", "padded"], device_type: str) -> Packing:
    """Resolve "auto" to packed: on a CPU in rows of the longest sequence of a micro-batch, on a GPU in few shapes.

    A GPU's libraries prepare a kernel for each new shape, which takes longer than a step of a small model; and blocks
    of memory of few sizes are used again.

    Where sequences are of one length, each has its row and no mask, as if they were padded. Where they are not, masks
    in rows that short cost less than padding: with half of the tokens padding, steps of a small model took 0.6 times as
    long on a CPU, with torch's attention, plain and compiled (benchmarks/alignment_arrangements.py).
    """
    if chosen == "auto":
        return "packed" if device_type == "cpu" else "bucketed"
    return chosen


def micro_batches_of(
    examples: Sequence[Example],
    *,
    max_tokens: int,
    row_length: int,
    packing: Packing = "packed",
    temperature: float = 1.0,
    at_least: int = 0,
) -> list[SequenceMicroBatch]:
    """Pack examples into micro-batches of at most `max_tokens` tokens, padding included; a larger example has a
    micro-batch of its own.

    `row_length` is the most tokens of a row, the model's context length; rows are as long as the longest sequence of
    their micro-batch, with "bucketed" of few shapes. There are `at_least` that many micro-batches, if need be empty
    ones: with fsdp all ranks compute the same number. Raises NapkinError for a sequence longer than a row.
    """
    groups = _groups_of(examples, max_tokens, row_length, packing)
    groups += [_Group(1, packing, max_tokens, row_length) for _ in range(at_least - len(groups))]
    return [group.arranged([examples[number] for number in group.numbers], temperature) for group in groups]


class MicroBatchShape(NamedTuple):
    """The sizes of a micro-batch, which its bytes follow from."""

    rows: int
    width: int
    targets: int
    """Tokens that are trained on."""
    is_masked: bool
    """True if rows hold several documents, or padding before them."""

    def __str__(self) -> str:
        return f"{self.rows} × {self.width:,} tokens"


def shapes_of(
    examples: Sequence[Example], *, max_tokens: int, row_length: int, packing: Packing
) -> list[MicroBatchShape]:
    """The shapes of all micro-batches that `micro_batches_of` makes."""
    return [
        MicroBatchShape(
            group.n_rows,
            group.width,
            sum(sequence.n_trained for number in group.numbers for sequence in examples[number]),
            group.is_masked,
        )
        for group in _groups_of(examples, max_tokens, row_length, packing)
    ]


def tokens_in_rows(examples: Sequence[Example], *, max_tokens: int, row_length: int, packing: Packing) -> int:
    """Count the tokens of all micro-batches that `micro_batches_of` makes, padding included."""
    groups = _groups_of(examples, max_tokens, row_length, packing)
    return sum(group.n_rows * group.width for group in groups)


def _groups_of(examples: Sequence[Example], max_tokens: int, row_length: int, packing: Packing) -> "list[_Group]":
    for number, example in enumerate(examples):
        longest = _longest(example)
        if longest > row_length:
            raise NapkinError(
                f"sequence {number} has {longest + 1:,} tokens, a row has {row_length + 1:,}: shorten it, or use a "
                "model with a longer context"
            )
    # Neighbours of one length need little padding. The sort is stable: the order is a function of the examples alone.
    order = sorted(range(len(examples)), key=lambda number: -_longest(examples[number]))
    groups: list[_Group] = []
    for number in order:
        # Short examples fill the space left in the rows of longer ones.
        if not any(group.add(number, examples[number]) for group in groups[-_OPEN_GROUPS:]):
            groups.append(_Group(_longest(examples[number]), packing, max_tokens, row_length))
            groups[-1].add(number, examples[number])
    return groups


_OPEN_GROUPS = 16
"""Micro-batches that may still take an example: a bound that keeps packing linear in the number of examples."""


def _n_inputs(sequence: TokenSequence) -> int:
    """The last token is only a target."""
    return len(sequence.tokens) - 1 or 1


def _longest(example: Example) -> int:
    return max(_n_inputs(sequence) for sequence in example)


def bucketed_width(length: int, max_tokens: int, row_length: int) -> int:
    """The length of rows with "bucketed" that hold a sequence: as long as a micro-batch, or half of that; where a
    sequence is longer than a micro-batch, twice as long and so on, up to `row_length`.

    >>> [bucketed_width(length, 4096, 10_000) for length in (1, 2048, 4096, 4097, 9000)]
    [2048, 2048, 4096, 8192, 10000]
    """
    most = min(max_tokens, row_length)
    width = -(-most // 2 ** (WIDTHS - 1))
    while width < length:
        width *= 2
    return min(width, row_length) if width > most else width


class _Group:
    """The examples of a micro-batch, and the rows of their sequences."""

    def __init__(self, longest: int, packing: Packing, max_tokens: int, row_length: int) -> None:
        self.width = bucketed_width(longest, max_tokens, row_length) if packing == "bucketed" else longest
        self.packing = packing
        self.max_tokens = max_tokens
        self.numbers: list[int] = []
        self.rows: list[list[tuple[int, int]]] = []
        """For each row, its sequences: their number in this micro-batch, and how many of their tokens are inputs."""
        self.room: list[int] = []
        """Tokens left in each row."""
        self.n_sequences = 0

    @property
    def is_masked(self) -> bool:
        # A mask is of a shape too: with "bucketed" all have one.
        return self.packing in ("padded left", "bucketed") or any(len(row) > 1 for row in self.rows)

    @property
    def n_rows(self) -> int:
        """Rows of the micro-batch; with "bucketed" as many as `max_tokens` allows, or a half, a quarter, an eighth."""
        rows = max(len(self.rows), 1)
        if self.packing != "bucketed":
            return rows
        most = max(1, self.max_tokens // self.width)
        heights = sorted(-(-most // 2**halvings) for halvings in range(HEIGHTS))
        # An example of several sequences may be larger than a micro-batch, and is alone then.
        return next((height for height in heights if height >= rows), -(-rows // most) * most)

    def add(self, number: int, example: Example) -> bool:
        """Take an example, each of its sequences in the first row that has room, unless that makes too many rows."""
        room, rows = [*self.room], []
        for sequence in example:
            length = _n_inputs(sequence)
            row = len(room)
            if self.packing in ("packed", "bucketed"):
                row = next((row for row, left in enumerate(room) if left >= length), row)
            if row == len(room):
                room.append(self.width)
            room[row] -= length
            rows.append((row, length))
        if self.numbers and len(room) * self.width > self.max_tokens:
            return False
        self.room = room
        self.rows += [[] for _ in range(len(room) - len(self.rows))]
        for row, length in rows:
            self.rows[row].append((self.n_sequences, length))
            self.n_sequences += 1
        self.numbers.append(number)
        return True

    def arranged(self, examples: Sequence[Example], temperature: float) -> SequenceMicroBatch:
        sequences = [sequence for example in examples for sequence in example]
        inputs = np.full((self.n_rows, self.width), PADDING, dtype=np.int64)
        documents = np.zeros_like(inputs)
        starts = [0] * len(sequences)
        for number, row in enumerate(self.rows):
            begin = self.width - sum(length for _, length in row) if self.packing == "padded left" else 0
            place = begin
            for document, (which, length) in enumerate(row, start=1):
                inputs[number, place : place + length] = sequences[which].tokens[:length]
                documents[number, place : place + length] = document
                starts[which] = number * self.width + place
                place += length
            # Padding is a document of its own, which no sequence sees; on the right none would in any case.
            documents[number, place:] = len(row) + 1
        places, targets, sequence = [], [], []
        for which, each in enumerate(sequences):
            counted = np.flatnonzero(each.loss_mask)
            places.append(starts[which] + counted - 1)
            targets.append(each.tokens[counted])
            sequence.append(np.full(len(counted), which))
        names = sequences[0].values.keys() if sequences else ()
        values = {
            name: torch.from_numpy(np.concatenate([each.values[name] for each in sequences]).astype(np.float32))
            for name in names
        }
        packed = PackedRows(
            torch.from_numpy(inputs),
            torch.from_numpy(documents) if self.is_masked else None,
            _joined(places),
            _joined(targets),
            temperature,
        )
        example = torch.tensor([place for place, each in enumerate(examples) for _ in each], dtype=torch.int64)
        return SequenceMicroBatch(packed, tuple(examples), tuple(self.numbers), _joined(sequence), example, values)


def _joined(parts: Sequence[np.ndarray]) -> Int[Tensor, " n"]:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64))


# Examples that are made on access: only those of a batch are in memory, however many there are.

EXAMPLES_PER_CHUNK = 256
"""Examples in memory at a time, where a pass goes over all of them."""


class LazyExamples(Sequence[Example], ABC):
    """Examples that a subclass makes on access, by their number."""

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
    for begin in range(0, len(examples), EXAMPLES_PER_CHUNK):
        yield examples[begin : begin + EXAMPLES_PER_CHUNK]


def tokens_of(examples: Sequence[Example], most: int = 1000) -> int:
    """Count the tokens of examples; beyond `most` examples, estimate them from that many, evenly spread."""
    n = min(len(examples), most)
    chosen = (examples[number * len(examples) // n] for number in range(n))
    return round(sum(len(sequence.tokens) for example in chosen for sequence in example) * len(examples) / max(n, 1))
