"""The stages `duplicates` and `near-duplicates`: of documents that are the same, or nearly so, one stays."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from napkin.curation.stage import Dropped, Record
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.curation.deduplication.document_decisions import NearKeys


@dataclass(frozen=True)
class Duplicates:
    """Drop documents whose text is that of another, but for white space."""

    name: ClassVar[str] = "duplicates"

    keep: Literal["longest", "first"] = "longest"
    """The copy that stays: the longest, of equally long ones that with the smallest identity; or the first of the
    input."""
    index: str = ""
    """A folder with the documents of earlier runs, which stay before those of this one; it is made, and extended."""

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        """Write the key of each document."""
        from napkin.curation.deduplication.document_decisions import ExactKeys
        from napkin.curation.deduplication.key_file import write_keys

        keys = ExactKeys()
        write_keys(summary, keys.header, keys.chunks((record.identity, record.text) for record in records))

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        """Write which documents are dropped."""
        from napkin.curation.deduplication.document_decisions import decide_on_documents

        decide_on_documents(self.name, summaries, decisions, scratch, memory, keep=self.keep, index=self.index)

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        """Each record, or of which other it is a duplicate."""
        return _applied(records, decisions, self.name, "duplicate")


@dataclass(frozen=True)
class NearDuplicates:
    """Drop documents that share most shingles of words with another, found by MinHash and its bands."""

    name: ClassVar[str] = "near-duplicates"

    threshold: float = 0.8
    """The Jaccard similarity from which documents are near-duplicates: bands and rows, if they are 0, are such that a
    pair at it is found with a probability of 0.9 at least."""
    hashes: int = 128
    """Numbers of a signature."""
    words: int = 5
    """Words of a shingle."""
    bands: int = 0
    """Bands of a signature; documents that share one are near-duplicates. 0: chosen by the threshold."""
    rows: int = 0
    """Numbers of a band. 0: chosen by the threshold."""
    keep: Literal["longest", "first"] = "longest"
    """The copy that stays: the longest, of equally long ones that with the smallest identity; or the first of the
    input."""
    index: str = ""
    """A folder with the documents of earlier runs, which stay before those of this one; it is made, and extended."""

    def __post_init__(self) -> None:
        if (self.bands == 0) != (self.rows == 0) or self.bands < 0 or self.rows < 0:
            raise NapkinError(f"{self.bands} bands of {self.rows} rows: set both, or leave both at 0")
        if self.bands * self.rows > self.hashes:
            raise NapkinError(f"{self.bands} bands of {self.rows} rows need more than {self.hashes} hashes: set hashes")
        if not 0 < self.threshold < 1:
            raise NapkinError(f"the threshold is {self.threshold:g}: use a similarity above 0 and below 1")

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        """Write a key per band of each document."""
        from napkin.curation.deduplication.key_file import write_keys

        keys = self._keys()
        write_keys(summary, keys.header, keys.chunks((record.identity, record.text) for record in records))

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        """Write which documents are dropped."""
        from napkin.curation.deduplication.document_decisions import decide_on_documents

        decide_on_documents(self.name, summaries, decisions, scratch, memory, keep=self.keep, index=self.index)

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        """Each record, or the document that stays in its place."""
        return _applied(records, decisions, self.name, "near-duplicate")

    def _keys(self) -> "NearKeys":
        from napkin.curation.deduplication.document_decisions import NearKeys
        from napkin.curation.deduplication.minhash import Banding, MinHash

        if self.bands:
            return NearKeys(MinHash(self.hashes, self.words), Banding(self.bands, self.rows))
        return NearKeys.of(self.threshold, self.hashes, self.words)


def _applied(records: Iterable[Record], decisions: Path, stage: str, rule: str) -> Iterator[Record | Dropped]:
    from napkin.curation.deduplication.verdicts import Verdicts

    for record, kept in Verdicts[str](decisions, stage, str).beside(records):
        yield record if kept is None else Dropped(rule, f"{kept} stays")
