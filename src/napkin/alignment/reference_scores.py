"""Log-probabilities of a reference model, computed once and kept: the model is not held in memory while another trains.

reference-train.safetensors and reference-held-out.safetensors in the folder of the run:

| tensor | |
|---|---|
| log_probabilities | fp32 [token]: of each token that counts, unit by unit, in nats |

and a header with one string, `reference`, a JSON object: `format`, `units` (checksum of the units), `start`
(fingerprint of the reference's weights), `precision` (that it was computed in), `checksum` (SHA-256 of the tensor's
bytes). A file that is damaged, or of something else, is computed again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import overload

import msgspec
import numpy as np
from jaxtyping import Float32

from napkin.alignment.objective import REFERENCE
from napkin.alignment.token_sequence import TokenSequence, Unit
from napkin.files import atomic_write_bytes, refuse_irregular

FORMAT = "napkin reference 1"


@dataclass(frozen=True)
class ReferenceKey:
    """What the log-probabilities of a reference depend on."""

    units: str
    """Checksum of the units, which says what the tokens are."""
    start: str
    """Fingerprint of the weights; "" where any will do."""
    precision: str

    @property
    def header(self) -> dict[str, str]:
        """As a file has it."""
        return {"format": FORMAT, "units": self.units, "start": self.start, "precision": self.precision}


class ReferredUnits(Sequence[Unit]):
    """Units that get a reference's log-probabilities when these are known."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        counts = [sequence.n_counted for unit in units for sequence in unit]
        self._ends = np.cumsum([0, *counts])
        self._firsts = np.cumsum([0, *(len(unit) for unit in units)])
        self.log_probabilities: Float32[np.ndarray, " token"] | None = None

    @property
    def n_tokens(self) -> int:
        """How many tokens count."""
        return int(self._ends[-1])

    def __len__(self) -> int:
        """How many units there are."""
        return len(self.units)

    @overload
    def __getitem__(self, number: int) -> Unit: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Unit]: ...
    def __getitem__(self, number: int | slice) -> Unit | Sequence[Unit]:
        """A unit, with `REFERENCE` among the values of its sequences if that is known; or several."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if self.log_probabilities is None:
            return self.units[number]
        ends = self._ends[self._firsts[number] : self._firsts[number] + len(self.units[number]) + 1]
        parts = [self.log_probabilities[begin:end] for begin, end in pairwise(ends)]
        return tuple(
            sequence.with_values(**{REFERENCE: part}) for sequence, part in zip(self.units[number], parts, strict=True)
        )


def write_reference_scores(path: Path, key: ReferenceKey, scores: Float32[np.ndarray, " token"]) -> None:
    """Write the log-probabilities atomically, replacing earlier ones."""
    from safetensors.numpy import save

    values = np.ascontiguousarray(scores, dtype=np.float32)
    header = {**key.header, "checksum": sha256(values.tobytes()).hexdigest()}
    # One string: the order of several would differ from file to file.
    atomic_write_bytes(path, save({"log_probabilities": values}, {"reference": json.dumps(header)}), overwrite=True)


def read_reference_scores(
    path: Path, key: ReferenceKey, n_tokens: int
) -> tuple[Float32[np.ndarray, " token"] | None, str]:
    """The log-probabilities of a file and ""; or None, and what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None, "there is none"
    try:
        refuse_irregular(path)
        with safe_open(path, "numpy") as file:
            header = msgspec.json.decode((file.metadata() or {}).get("reference", "{}"), type=dict[str, str])
            keys = set(file.keys())
            shape = file.get_slice("log_probabilities").get_shape() if keys == {"log_probabilities"} else None
            scores = file.get_tensor("log_probabilities") if shape == [n_tokens] else None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        return None, f"it cannot be read ({error})"
    for name, value in key.header.items():
        if value and header.get(name) != value:
            return None, _OTHER[name]
    if scores is None or scores.dtype != np.float32 or header.get("checksum") != sha256(scores.tobytes()).hexdigest():
        return None, "it is damaged"
    return scores, ""


_OTHER = {
    "format": "it is not a file of a reference",
    "units": "the data, or their tokens, have changed",
    "start": "the weights of the model that tuning starts from have changed",
    "precision": "it was computed in another precision",
}


def with_stand_ins(unit: Unit) -> Unit:
    """A unit as the reference's log-probabilities would make it, for counting."""
    return tuple(_with_zeros(sequence) for sequence in unit)


def _with_zeros(sequence: TokenSequence) -> TokenSequence:
    return sequence.with_values(**{REFERENCE: np.zeros(sequence.n_counted, np.float32)})
