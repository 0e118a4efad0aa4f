"""The stage `duplicate-lines`: of each line of a corpus the first stays, or none of those that stand twice.

The stage `duplicate-substrings`: of a passage that stands in a corpus several times the first stays.

The stage `decontaminate`: documents with questions of a task in them are dropped, as `napkin contamination` finds
them.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from napkin.curation.stage import Dropped, Record, TraceEntry
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.curation.deduplication.key_file import KeyChunk, KeyFile
    from napkin.curation.deduplication.verdicts import Marks
    from napkin.evaluation.contamination import ItemSearch


@dataclass(frozen=True)
class DuplicateLines:
    """Remove lines that stand earlier in the corpus, in the order of the input, and documents that have no other.

    With `keep = "none"`, all copies of a line that stands twice are removed: what is left stands once in the corpus.
    Lines are compared by 128 bits of a hash, without regard to white space (CCNet, Wenzek et al. 2020).
    """

    name: ClassVar[str] = "duplicate-lines"

    shortest: int = 30
    """Characters of a line that is looked at, white space at both ends not counted; shorter ones stay."""
    keep: Literal["first", "none"] = "first"
    """The copy of a repeated line that stays: the first, or none."""
    index: str = ""
    """A folder with the lines of earlier runs, which are removed from this one; it is made, and extended."""

    def __post_init__(self) -> None:
        if self.shortest < 1:
            raise NapkinError(f"shortest is {self.shortest}: use 1 character or more")

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        """Write the key of each line that is long enough, and where it is."""
        from napkin.curation.deduplication.key_file import KeyHeader, write_keys

        header = KeyHeader(f"BLAKE2b-128 of lines of {self.shortest} characters or more", tables=1, width=2)
        write_keys(summary, header, self._chunks(records))

    def _chunks(self, records: Iterable[Record]) -> "Iterator[KeyChunk]":
        import numpy as np

        from napkin.curation.deduplication.document_decisions import text_digest
        from napkin.curation.deduplication.key_file import CHUNK, KeyChunk

        # The header of verdicts has the number of records, so the last entry of a summary is that number.
        count = 0

        def lines() -> Iterator[tuple[int, bytes]]:
            nonlocal count
            for record in records:
                for number, line in enumerate(record.text.split("\n")):
                    if len(line.strip()) >= self.shortest:
                        yield count << 32 | number, text_digest(line)
                count += 1
            yield count << 32, bytes(16)

        found = lines()
        while batch := list(itertools.islice(found, CHUNK)):
            keys = np.frombuffer(b"".join(digest for _, digest in batch), "<u8").reshape(1, len(batch), 2)
            yield KeyChunk([""] * len(batch), np.array([place for place, _ in batch], np.int64), keys)

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        """Write which lines are removed."""
        import numpy as np

        from napkin.curation.deduplication.equal_keys import equal_pairs, numbered_keys
        from napkin.curation.deduplication.key_file import open_key_files, opened_index
        from napkin.curation.deduplication.verdicts import Marks, write_verdicts

        with opened_index(self.index, summaries) as known:
            earlier = [path for generation in known.earlier() for path in generation] if known else []
            files = open_key_files([*earlier, *summaries])
            count = sum(map(len, files))
            removed = Marks(count, scratch / "removed", memory // 4)
            for firsts, others in equal_pairs(numbered_keys(files, 0), count, 2, scratch, memory // 2):
                removed.set(others)
                if self.keep == "none":
                    removed.set(firsts)
            starts = np.cumsum([0, *map(len, files)]).tolist()
            for number, decision in enumerate(decisions, len(earlier)):
                file = files[number]
                n_records = int(file.values(len(file.starts) - 2)[-1]) >> 32
                write_verdicts(decision, self.name, n_records, _removed_lines(file, starts[number], removed))
            if known:
                known.extend()

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        """Each record without the lines that stand earlier; dropped if nothing remains."""
        from napkin.curation.deduplication.verdicts import Verdicts

        for record, removed in Verdicts[list[int]](decisions, self.name, list[int]).beside(records):
            if removed is None:
                yield record
                continue
            gone = set(removed)
            lines = [line for number, line in enumerate(record.text.split("\n")) if number not in gone]
            text = "\n".join(lines)
            if not text.strip():
                yield Dropped("only duplicate lines", f"{len(gone)} lines")
                continue
            record.text = text
            record.trace.append(TraceEntry(self.name, f"{len(gone)} lines removed"))
            yield record


def _removed_lines(file: "KeyFile", start: int, removed: "Marks") -> Iterator[tuple[int, list[int]]]:
    """(record, its lines that are removed) of a shard whose first line has the number `start`."""

    def places() -> Iterator[int]:
        for chunk, (first, last) in enumerate(itertools.pairwise(file.starts.tolist())):
            yield from file.values(chunk)[removed.between(start + first, start + last)].tolist()

    for record, group in itertools.groupby(places(), lambda place: place >> 32):
        yield record, [place & 0xFFFFFFFF for place in group]


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
        from napkin.curation.deduplication.passages import write_passages

        write_passages(summary, (record.text for record in records), self.shortest)

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        """Write which bytes of which documents are removed."""
        from napkin.curation.deduplication.passages import PassageFile, RepeatedPassages
        from napkin.curation.deduplication.verdicts import write_verdicts

        files = [PassageFile(summary, self.shortest) for summary in summaries]
        found = RepeatedPassages(files, self.shortest, scratch, memory)
        for number, (file, decision) in enumerate(zip(files, decisions, strict=True)):
            write_verdicts(decision, self.name, len(file.ends), found.of_records(number))

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        """Each record without the passages that stand earlier; dropped if nothing remains."""
        from napkin.curation.deduplication.passages import without_spans
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


@dataclass(frozen=True)
class Decontaminate:
    """Drop documents that hold an item of a task, whatever its case, spaces, line breaks, punctuation, HTML and the
    order of its choices.

    Items of fewer than 48 letters and digits cannot be told from other text, and are not looked for.
    """

    name: ClassVar[str] = "decontaminate"
    version: ClassVar[int] = 2
    reads: ClassVar[tuple[str, ...]] = ("tasks",)

    tasks: tuple[str, ...]
    """Files of tasks, or folders with the files of one, as `napkin evaluate --task` reads them."""
    share: float = 0.6
    """Of an item's windows of 32 letters and digits that stand together in a document, for the item to be in it."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise NapkinError("no task is named: give `tasks` files of tasks")
        if not 0 < self.share <= 1:
            raise NapkinError(f"the share of windows is {self.share:g}: use a number above 0, at most 1")

    def apply(self, record: Record) -> Record | Dropped:
        """The record, or which item it holds."""
        from napkin.data.curated_corpus import Document

        search, names = _search_of(self.tasks)
        document = Document(record.identity, data=record.text.encode("utf-8", "replace"))
        found = [*search.add(document), *search.flush()]
        share, index = max(((share, -index) for index, share, _ in found), default=(0.0, 0))
        if share >= self.share:
            return Dropped("contaminated", f"{names[-index]}: {share:.2f} of its windows")
        return record


@lru_cache(maxsize=8)
def _search_of(tasks: tuple[str, ...]) -> "tuple[ItemSearch, list[str]]":
    """The index of all items, and their names; the files are read once per process."""
    from napkin.evaluation.contamination import ItemSearch, looked_for
    from napkin.evaluation.tasks.task_file import read_task

    read = [read_task([path], skip_bad=True) for path in tasks]
    names = [f"{task.name}/{item.name}" for task in read for item in task.items]
    return ItemSearch([looked_for(item) for task in read for item in task.items]), names
