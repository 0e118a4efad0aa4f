"""The stage `classifier`: documents by the score of a model that the user trained on positives and negatives."""

from dataclasses import dataclass
from typing import ClassVar

from napkin.curation.filters.thresholds import check_fractions
from napkin.curation.record import Record, TraceEntry
from napkin.curation.stage import Dropped
from napkin.errors import NapkinError


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
        check_fractions(min_score=self.min_score, max_score=self.max_score)
        if not self.field:
            raise NapkinError("field is empty: name the field that gets the score")

    def apply(self, record: Record) -> Record | Dropped:
        """The record with its score, if that is within the bounds."""
        from napkin.curation.filters.quality_model_file import read_quality_model

        # Six digits: what is written is what is compared, on any machine.
        score = round(read_quality_model(self.model).score(record.text), 6)
        if score < self.min_score:
            return Dropped(f"low {self.field}", f"{score} < {self.min_score}")
        if score > self.max_score:
            return Dropped(f"high {self.field}", f"{score} > {self.max_score}")
        record.fields[self.field] = score
        record.trace.append(TraceEntry(self.name, f"{self.field}: {score}"))
        return record
