"""The stage `perplexity`: documents by the bits per byte that an n-gram model gives them."""

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from napkin.curation.stage import Dropped, Record, TraceEntry
from napkin.errors import NapkinError
from napkin.files import refuse_irregular

if TYPE_CHECKING:
    from napkin.evaluation.ngrams import NgramModel


@dataclass(frozen=True)
class Perplexity:
    """Score documents by the bits per byte of a model of `napkin evaluate ngrams --out`, trained on text of the kind
    that is wanted, and drop those with low or high ones.

    What repeats itself has few bits, what is not language has many (Wenzek et al. 2020). With neither bound the bits
    are only noted.
    """

    name: ClassVar[str] = "perplexity"
    reads: ClassVar[tuple[str, ...]] = ("model",)

    model: str
    """File of the model."""
    field: str = "bits_per_byte"
    """The field of documents that gets the bits per byte."""
    min_bits: float = 0.0
    """Drop documents with fewer bits per byte."""
    max_bits: float = 64.0
    """Drop documents with more bits per byte."""

    def __post_init__(self) -> None:
        for option in ("min_bits", "max_bits"):
            if not 0 <= getattr(self, option) <= 64:
                raise NapkinError(f"{option} is {getattr(self, option)}: use 0 to 64 bits per byte")
        if not self.field:
            raise NapkinError("field is empty: name the field that gets the bits per byte")

    def apply(self, record: Record) -> Record | Dropped:
        data = record.text.encode("utf-8", "surrogatepass")
        if not data:
            return Dropped("no text", "0 bytes")
        # Six digits: what is written is what is compared, on any machine.
        bits = round(float(_model(self.model).bits([data])[0]) / len(data), 6)
        if bits < self.min_bits:
            return Dropped(f"low {self.field}", f"{bits} < {self.min_bits}")
        if bits > self.max_bits:
            return Dropped(f"high {self.field}", f"{bits} > {self.max_bits}")
        record.fields[self.field] = bits
        record.trace.append(TraceEntry(self.name, f"{self.field}: {bits}"))
        return record


def _model(path: str) -> "NgramModel":
    """Read a model; one that was read before and has not changed since is not read again."""
    try:
        refuse_irregular(path)
        status = os.stat(path)
    except OSError as error:
        raise NapkinError(f"the n-gram model '{path}' cannot be read: {error.strerror}") from None
    return _read(path, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _read(path: str, changed: int) -> "NgramModel":
    from napkin.evaluation.ngrams import NgramModel

    del changed
    return NgramModel.load(path)
