"""Sequences in rows, rows in micro-batches: padded to one length, or packed one after the other.

What is learned does not depend on it: a packed sequence sees itself alone, padding is never a target, and each
micro-batch's loss is a part of one sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from napkin.alignment.token_sequence import TokenSequence, Unit
from napkin.distributed.micro_batches import PackedRows
from napkin.errors import NapkinError

Arrangement = Literal["packed", "padded", "padded left"]
"""Several sequences a row, masked from each other; or one a row, with padding after it, or before it."""

PADDING = 0
"""The id that fills rows: any will do, since nothing sees it."""


@dataclass(frozen=True, eq=False)
class SequenceMicroBatch:
    """Units of a batch in rows, and where each of their tokens that count belongs."""

    rows: PackedRows
    units: tuple[Unit, ...]
    unit_numbers: tuple[int, ...]
    """Of each unit, its number in the batch."""
    sequence: Int[Tensor, " token"]
    """The number of each counted token's sequence, among the sequences of the units in their order."""
    unit: Int[Tensor, " sequence"]
    """The number of each sequence's unit in this micro-batch."""
    values: Mapping[str, Float[Tensor, " token"]]
    """The sequences' values of that name, one after the other."""

    @property
    def sequences(self) -> list[TokenSequence]:
        """Those of the units, in their order."""
        return [sequence for unit in self.units for sequence in unit]

    @property
    def n_sequences(self) -> int:
        """How many sequences there are."""
        return len(self.unit)

    def with_coefficients(self, coefficients: Float[Tensor, " token"]) -> "SequenceMicroBatch":
        """The same with the loss's gradient with respect to each log-probability."""
        return replace(self, rows=replace(self.rows, coefficients=coefficients))

    def to(self, device: str | torch.device) -> "SequenceMicroBatch":
        """The same on another device."""
        rows = replace(
            self.rows,
            inputs=self.rows.inputs.to(device),
            documents=None if self.rows.documents is None else self.rows.documents.to(device),
            places=self.rows.places.to(device),
            targets=self.rows.targets.to(device),
        )
        values = {name: value.to(device) for name, value in self.values.items()}
        return replace(self, rows=rows, sequence=self.sequence.to(device), unit=self.unit.to(device), values=values)


def micro_batches_of(
    units: Sequence[Unit],
    *,
    max_tokens: int,
    row_length: int,
    arrangement: Arrangement = "packed",
    temperature: float = 1.0,
    at_least: int = 0,
) -> list[SequenceMicroBatch]:
    """Arrange units in micro-batches of at most `max_tokens` tokens, padding included; a larger unit is alone in its.

    `row_length` is the length of a row when sequences are packed, at most the model's context length. There are
    `at_least` that many micro-batches, if need be empty ones: with fsdp all ranks compute the same number. Raises
    NapkinError for a sequence longer than a row.
    """
    for number, unit in enumerate(units):
        longest = max(len(sequence.tokens) for sequence in unit)
        # The last token is only a target.
        if longest - 1 > row_length:
            raise NapkinError(
                f"sequence {number} has {longest:,} tokens, a row has {row_length + 1:,}: shorten it, or use a model "
                "with a longer context"
            )
    # Neighbours of one length need little padding. The sort is stable: the order is a function of the units alone.
    order = sorted(range(len(units)), key=lambda number: -max(len(each.tokens) for each in units[number]))
    groups: list[list[int]] = []
    for number in order:
        if groups and _n_tokens([units[each] for each in [*groups[-1], number]], row_length, arrangement) <= max_tokens:
            groups[-1].append(number)
        else:
            groups.append([number])
    groups += [[] for _ in range(at_least - len(groups))]
    return [_arranged([units[each] for each in group], group, row_length, arrangement, temperature) for group in groups]


def _n_tokens(units: Sequence[Unit], row_length: int, arrangement: Arrangement) -> int:
    rows = _rows([sequence for unit in units for sequence in unit], row_length, arrangement)
    return len(rows) * max(sum(length for _, length in row) for row in rows)


def _rows(sequences: Sequence[TokenSequence], row_length: int, arrangement: Arrangement) -> list[list[tuple[int, int]]]:
    """Each row's sequences, as their number and how many of their tokens are inputs: first fit, longest first."""
    lengths = [len(sequence.tokens) - 1 or 1 for sequence in sequences]
    if arrangement != "packed":
        return [[(number, length)] for number, length in enumerate(lengths)]
    rows: list[list[tuple[int, int]]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        row = next((row for row, left in enumerate(room) if left >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(row_length)
        rows[row].append((number, length))
        room[row] -= length
    return rows


def _arranged(
    units: Sequence[Unit], numbers: Sequence[int], row_length: int, arrangement: Arrangement, temperature: float
) -> SequenceMicroBatch:
    sequences = [sequence for unit in units for sequence in unit]
    rows = _rows(sequences, row_length, arrangement)
    width = max((sum(length for _, length in row) for row in rows), default=1)
    inputs = np.full((max(len(rows), 1), width), PADDING, dtype=np.int64)
    documents = np.zeros_like(inputs)
    starts = [0] * len(sequences)
    for number, row in enumerate(rows):
        begin = width - sum(length for _, length in row) if arrangement == "padded left" else 0
        place = begin
        for document, (which, length) in enumerate(row, start=1):
            inputs[number, place : place + length] = sequences[which].tokens[:length]
            documents[number, place : place + length] = document
            starts[which] = number * width + place
            place += length
        # Padding is a document of its own, which no sequence sees; on the right none would in any case.
        documents[number, place:] = len(row) + 1
    places, targets, sequence = [], [], []
    for which, each in enumerate(sequences):
        counted = np.flatnonzero(each.counts)
        places.append(starts[which] + counted - 1)
        targets.append(each.tokens[counted])
        sequence.append(np.full(len(counted), which))
    names = sequences[0].values.keys() if sequences else ()
    values = {
        name: torch.from_numpy(np.concatenate([each.values[name] for each in sequences]).astype(np.float32))
        for name in names
    }
    separate = arrangement == "padded left" or any(len(row) > 1 for row in rows)
    packed = PackedRows(
        torch.from_numpy(inputs),
        torch.from_numpy(documents) if separate else None,
        _joined(places),
        _joined(targets),
        temperature,
    )
    unit = torch.tensor([place for place, each in enumerate(units) for _ in each], dtype=torch.int64)
    return SequenceMicroBatch(packed, tuple(units), tuple(numbers), _joined(sequence), unit, values)


def _joined(parts: Sequence[np.ndarray]) -> Int[Tensor, " n"]:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64))
