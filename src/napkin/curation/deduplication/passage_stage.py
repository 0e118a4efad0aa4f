"""The stage `duplicate-substrings`: of a passage that stands in a corpus several times the first stays."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from napkin.curation.record import Record, TraceEntry
from napkin.curation.stage import Dropped
from napkin.errors import NapkinError


@dataclass(frozen=True)
class DuplicateSubstrings:
    """Remove passages that stand earlier in the corpus, in the order of the input, and documents of nothing else.

    These are exact substrings (Lee et al. 2022); its figure of 50 tokens is about 200 bytes of English.
    """

    name: ClassVar[str] = "duplicate-substrings"

    shortest: int = 200
    """Bytes of UTF-8 from which a repeated passage is removed."""

    def __post_init__(self) -> None:
        if not 16 <= self.shortest <= 2**20:
            raise NapkinError(f"shortest is {self.shortest} bytes: use 16 to {2**20}")

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        """Write the texts, and anchors in them."""
        from napkin.curation.deduplication.passage_file import write_passages

        write_passages(summary, (record.text for record in records), self.shortest)

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        """Write which bytes of which documents are removed."""
        from napkin.curation.deduplication.passage_file import PassageFile
        from napkin.curation.deduplication.repeated_passages import RepeatedPassages
        from napkin.curation.deduplication.verdicts import write_verdicts

        files = [PassageFile(summary, self.shortest) for summary in summaries]
        found = RepeatedPassages(files, self.shortest, scratch, memory)
        for number, (file, decision) in enumerate(zip(files, decisions, strict=True)):
            write_verdicts(decision, self.name, len(file.ends), found.of_records(number))

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        """Each record without the passages that stand earlier; dropped if nothing remains."""
        from napkin.curation.deduplication.repeated_passages import without_spans
        from napkin.curation.deduplication.verdicts import Verdicts

        kind = list[tuple[int, int]]
        for record, spans in Verdicts[list[tuple[int, int]]](decisions, self.name, kind).beside(records):
            if spans is None:
                yield record
                continue
            data = record.text.encode("utf-8", "surrogatepass")
            rest = without_spans(data, spans)
            note = f"{len(data) - len(rest)} bytes in {len(spans)} passages"
            text = rest.decode("utf-8", "surrogatepass")
            if not text.strip():
                yield Dropped("only duplicate substrings", note)
                continue
            record.text = text
            record.trace.append(TraceEntry(self.name, f"{note} removed"))
            yield record
