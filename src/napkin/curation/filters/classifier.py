"""The stage `classifier`: documents by the score of a model that the user trained on positives and negatives.

The stage `best-share`: the best documents of a corpus by a number that an earlier stage found.

A summary is the number of each record as float64; the decision on a shard is one float64, the least number to keep. The
threshold is found by bisection over all float64 numbers, in passes over the summaries, in bounded memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from napkin.curation.filters.web_rules import check_fractions
from napkin.curation.stage import Dropped, Record, TraceEntry
from napkin.errors import NapkinError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Classifier:
    """Score documents by a model of `napkin data train-classifier`, and drop those with a low or a high score.

    A score is between 0 and 1. For quality drop low scores; for toxicity train with toxic texts as positives, and drop
    high ones. With neither, the score is only noted, and `best-share` may choose by it.
    """

    name: ClassVar[str] = "classifier"
    reads: ClassVar[tuple[str, ...]] = ("model",)

    model: str
    """File of the model."""
    field: str = "quality"
    """The field of documents that gets the score."""
    min_score: float = 0.0
    """Drop documents with a lower score."""
    max_score: float = 1.0
    """Drop documents with a higher score."""

    def __post_init__(self) -> None:
        check_fractions(self, "min_score", "max_score")
        if not self.field:
            raise NapkinError("field is empty: name the field that gets the score")

    def apply(self, record: Record) -> Record | Dropped:
        from napkin.curation.filters.quality_model import read_quality_model

        # Six digits: what is written is what is compared, on any machine.
        score = round(read_quality_model(self.model).score(record.text), 6)
        if score < self.min_score:
            return Dropped(f"low {self.field}", f"{score} < {self.min_score}")
        if score > self.max_score:
            return Dropped(f"high {self.field}", f"{score} > {self.max_score}")
        record.fields[self.field] = score
        record.trace.append(TraceEntry(self.name, f"{self.field}: {score}"))
        return record


_BATCH = 2**16
"""Numbers that are read or written at once."""


@dataclass(frozen=True)
class BestShare:
    """Keep the documents with the highest numbers in a field, such as the score of `classifier`.

    Documents that tie with the last kept one are kept as well.
    """

    name: ClassVar[str] = "best-share"

    share: float
    """Fraction of documents to keep, at least; above 0."""
    field: str = "quality"
    """The field with the number."""

    def __post_init__(self) -> None:
        check_fractions(self, "share")
        if self.share == 0:
            raise NapkinError("share is 0: nothing would be kept")

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        import numpy as np

        numbers: list[float] = []
        with summary.open("xb") as file:
            for record in records:
                numbers.append(_number(record, self.field))
                if len(numbers) == _BATCH:
                    file.write(np.array(numbers, np.float64).tobytes())
                    numbers.clear()
            file.write(np.array(numbers, np.float64).tobytes())

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        import numpy as np

        del scratch, memory
        total = sum(summary.stat().st_size for summary in summaries) // 8
        bits = np.array([share_threshold(summaries, self.share, total)])
        for decision in decisions:
            decision.write_bytes(bits.tobytes())

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        import numpy as np

        threshold = float(np.frombuffer(decisions.read_bytes(), np.float64)[0])
        for record in records:
            number = _number(record, self.field)
            yield record if number >= threshold else Dropped(f"low {self.field}", f"{number:.6g} < {threshold:.6g}")


def share_threshold(files: Sequence[Path], share: float, total: int) -> float:
    """The largest number that at least a share of the `total` float64 numbers in some files reach."""
    import numpy as np

    # At least one document of a corpus, and no rounding error in the share.
    wanted = max(1, int(np.ceil(share * total - 1e-9)))
    # Bisect over the bits of float64 as integers, which have the same order.
    low, high = _ordered(np.array([-np.inf, np.inf])).tolist()
    while low < high:
        middle = (low + high + 1) // 2
        at_least = sum(int((keys >= middle).sum()) for keys in _orders(files))
        low, high = (middle, high) if at_least >= wanted else (low, middle - 1)
    return float(np.array([low if low >= 0 else -(2**63) - low], np.int64).view(np.float64)[0])


def _number(record: Record, field: str) -> float:
    value: Any = record.fields.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise NapkinError(f"'{record.identity}' has no number '{field}': put a stage before this one that finds it")
    return float(value)


def _ordered(numbers: "NDArray[np.float64]") -> "NDArray[np.int64]":
    """An integer for each float64, in the same order: the bits, with those of negative numbers turned round."""
    import numpy as np

    # -0 and 0 are equal.
    bits = (numbers + 0.0).view(np.int64)
    return np.where(bits < 0, np.int64(-(2**63)) - bits, bits)


def _orders(summaries: Sequence[Path]) -> "Iterator[NDArray[np.int64]]":
    import numpy as np

    for summary in summaries:
        with summary.open("rb") as file:
            while numbers := file.read(8 * _BATCH):
                yield _ordered(np.frombuffer(numbers, np.float64))
