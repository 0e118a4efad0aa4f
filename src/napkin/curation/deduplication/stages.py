"""The stages that compare documents with each other or with the items of tasks.

`duplicates` and `near-duplicates`: of documents that are the same, or nearly so, one stays; `bloom-duplicates` is the
first of these in fixed memory, with a few false positives. `duplicate-lines`: of each
line of a corpus the first stays, or none of those that stand twice. `duplicate-substrings`: of a passage that stands in
a corpus several times the first stays. `decontaminate`: documents with questions of a task in them are dropped, as
`napkin contamination` finds them.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from napkin.curation.stage import Dropped, Record, TraceEntry
from napkin.errors import NapkinError
from napkin.units import format_bytes

if TYPE_CHECKING:
    from napkin.curation.deduplication.document_decisions import ExactKeys, NearKeys
    from napkin.curation.deduplication.equal_keys import Marks
    from napkin.curation.deduplication.minhash import Banding, MinHash
    from napkin.curation.deduplication.shard_files import KeyChunk, KeyFile
    from napkin.evaluation.contamination import ItemSearch


class _DocumentStage:
    """A stage that keeps one of the documents that share a key."""

    name: ClassVar[str]
    rule: ClassVar[str]
    """The rule that is named for the dropped documents."""
    keep: Literal["longest", "first"]
    index: str

    def _keys(self) -> "ExactKeys | NearKeys":
        raise NotImplementedError

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        from napkin.curation.deduplication.shard_files import write_keys

        keys = self._keys()
        write_keys(summary, keys.header, keys.chunks((record.identity, record.text) for record in records))

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        from napkin.curation.deduplication.document_decisions import decide_on_documents

        decide_on_documents(self.name, summaries, decisions, scratch, memory, keep=self.keep, index=self.index)

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        from napkin.curation.deduplication.shard_files import with_verdicts

        for record, kept in with_verdicts(records, decisions, self.name, str):
            yield record if kept is None else Dropped(self.rule, f"{kept} stays")


@dataclass(frozen=True)
class Duplicates(_DocumentStage):
    """Drop documents whose text equals that of another, apart from white space."""

    name: ClassVar[str] = "duplicates"
    rule: ClassVar[str] = "duplicate"

    keep: Literal["longest", "first"] = "longest"
    """The copy that stays: the longest, of equally long ones that with the smallest identity; or the first of the
    input."""
    index: str = ""
    """A folder with the documents of earlier runs, which stay before those of this one; it is made, and extended."""

    def _keys(self) -> "ExactKeys":
        from napkin.curation.deduplication.document_decisions import ExactKeys

        return ExactKeys()


@dataclass(frozen=True)
class BloomDuplicates:
    """Drop documents whose text occurred earlier in the corpus, apart from white space, and a small share of new ones
    that a Bloom filter mistakes for seen ones: one pass over the keys, in a fixed amount of memory and no disk
    space."""

    name: ClassVar[str] = "bloom-duplicates"

    documents: int = 10_000_000
    """Documents for which there is room; more are refused."""
    false_positives: float = 1e-6
    """The share of new documents, after that many others, that is dropped by mistake."""

    def __post_init__(self) -> None:
        if not 1e-15 <= self.false_positives <= 0.5:
            raise NapkinError(f"false_positives is {self.false_positives:g}: use a share from 1e-15 to 0.5")
        if not 1 <= self.documents <= 2**40:
            raise NapkinError(f"documents is {self.documents}: use 1 to {2**40}")

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        from napkin.curation.deduplication.document_decisions import ExactKeys
        from napkin.curation.deduplication.shard_files import write_keys

        keys = ExactKeys()
        write_keys(summary, keys.header, keys.chunks((record.identity, record.text) for record in records))

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        from napkin.curation.deduplication.bloom import BloomFilter, bits_of
        from napkin.curation.deduplication.shard_files import open_key_files, write_verdicts

        size = bits_of(self.documents, self.false_positives) // 8
        if size > memory // 2:
            raise NapkinError(
                f"a Bloom filter for {self.documents:,} documents takes {format_bytes(size)}: use memory_bytes of "
                f"{2 * size} or more, fewer documents, or more false_positives"
            )
        files = open_key_files(summaries)
        if (count := sum(map(len, files))) > self.documents:
            raise NapkinError(
                f"the corpus has {count:,} documents, and a Bloom filter for {self.documents:,} would drop more of "
                f"them than it should: use documents {count}"
            )
        seen = BloomFilter(self.documents, false_positives=self.false_positives)
        for file, decision in zip(files, decisions, strict=True):

            def verdicts(file: "KeyFile" = file) -> Iterator[tuple[int, str]]:
                first = 0
                for keys in file.tables(0):
                    # In pieces, since each key has one place per hash.
                    for start in range(0, len(keys), 2048):
                        found = seen.add(keys[start : start + 2048])
                        yield from ((first + start + int(place), "seen") for place in found.nonzero()[0])
                    first += len(keys)

            write_verdicts(decision, self.name, len(file), verdicts())

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        from napkin.curation.deduplication.shard_files import with_verdicts

        for record, verdict in with_verdicts(records, decisions, self.name, str):
            yield record if verdict is None else Dropped("seen before")


@dataclass(frozen=True)
class NearDuplicates(_DocumentStage):
    """Drop documents that share most shingles of words with another, found by MinHash and its bands."""

    name: ClassVar[str] = "near-duplicates"
    rule: ClassVar[str] = "near-duplicate"

    threshold: float = 0.8
    """The Jaccard similarity from which documents are near-duplicates: bands and rows, if they are 0, are chosen to
    find a pair of exactly this similarity with a probability of at least 0.9."""
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

    def _keys(self) -> "NearKeys":
        from napkin.curation.deduplication.document_decisions import NearKeys

        return NearKeys(self.minhash, self.banding)

    @property
    def minhash(self) -> "MinHash":
        from napkin.curation.deduplication.minhash import MinHash

        return MinHash(self.hashes, self.words)

    @property
    def banding(self) -> "Banding":
        """The bands and rows that were set, or those of the threshold. Raises NapkinError for too many hashes."""
        from napkin.curation.deduplication.minhash import Banding, choose_banding

        hashes = self.minhash.hashes
        return Banding(self.bands, self.rows) if self.bands else choose_banding(self.threshold, hashes)


@dataclass(frozen=True)
class DuplicateLines:
    """Remove lines that stand earlier in the corpus, in the order of the input, and documents that have no other.

    With `keep = "none"`, all copies of a line that stands twice are removed: what is left stands once in the corpus.
    Lines are compared by 128 bits of a hash, without regard to white space (CCNet, Wenzek et al. 2020).
    """

    name: ClassVar[str] = "duplicate-lines"

    shortest: int = 30
    """The fewest characters of a line to compare, without white space at both ends; shorter lines stay."""
    keep: Literal["first", "none"] = "first"
    """The copy of a repeated line that stays: the first, or none."""
    index: str = ""
    """A folder with the lines of earlier runs, which are removed from this one; it is made, and extended."""

    def __post_init__(self) -> None:
        if self.shortest < 1:
            raise NapkinError(f"shortest is {self.shortest}: use 1 character or more")

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        from napkin.curation.deduplication.shard_files import KeyHeader, write_keys

        header = KeyHeader(f"BLAKE2b-128 of lines of {self.shortest} characters or more", tables=1, width=2)
        write_keys(summary, header, self._chunks(records))

    def _chunks(self, records: Iterable[Record]) -> "Iterator[KeyChunk]":
        import numpy as np

        from napkin.curation.deduplication.document_decisions import text_digest
        from napkin.curation.deduplication.shard_files import CHUNK, KeyChunk

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
        import numpy as np

        from napkin.curation.deduplication.equal_keys import Marks, equal_pairs, numbered_keys
        from napkin.curation.deduplication.shard_files import extended_index, open_key_files, write_verdicts

        with extended_index(self.index, summaries) as earlier:
            files = open_key_files([path for paths in [*earlier, summaries] for path in paths])
            count = sum(map(len, files))
            removed = Marks(count, scratch / "removed", memory // 4)
            for firsts, others in equal_pairs(numbered_keys(files, 0), count, 2, scratch, memory // 2):
                removed.set(others)
                if self.keep == "none":
                    removed.set(firsts)
            starts = np.cumsum([0, *map(len, files)]).tolist()
            for number, decision in enumerate(decisions, len(files) - len(decisions)):
                file = files[number]
                n_records = int(file.values(len(file.starts) - 2)[-1]) >> 32
                write_verdicts(decision, self.name, n_records, _removed_lines(file, starts[number], removed))

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        from napkin.curation.deduplication.shard_files import with_verdicts

        for record, removed in with_verdicts(records, decisions, self.name, list[int]):
            if removed is None:
                yield record
                continue
            gone = set(removed)
            lines = [line for number, line in enumerate(record.text.split("\n")) if number not in gone]
            yield _cut(record, self.name, "\n".join(lines), f"{len(gone)} lines")


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
        from napkin.curation.deduplication.passages import write_passages

        write_passages(summary, (record.text for record in records), self.shortest)

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        from napkin.curation.deduplication.passages import PassageFile, RepeatedPassages
        from napkin.curation.deduplication.shard_files import write_verdicts

        files = [PassageFile(summary, self.shortest) for summary in summaries]
        repeated = RepeatedPassages(files, self.shortest, scratch, memory)
        for number, (file, decision) in enumerate(zip(files, decisions, strict=True)):
            write_verdicts(decision, self.name, len(file.ends), repeated.of_records(number))

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        from napkin.curation.deduplication.passages import without_spans
        from napkin.curation.deduplication.shard_files import with_verdicts

        for record, spans in with_verdicts(records, decisions, self.name, list[tuple[int, int]]):
            if spans is None:
                yield record
                continue
            data = record.text.encode("utf-8", "surrogatepass")
            rest = without_spans(data, spans)
            note = f"{len(data) - len(rest)} bytes in {len(spans)} passages"
            yield _cut(record, self.name, rest.decode("utf-8", "surrogatepass"), note)


def _cut(record: Record, stage: str, text: str, removed: str) -> Record | Dropped:
    """The record with the text that remains; dropped if nothing does."""
    if not text.strip():
        return Dropped(f"only {stage.replace('-', ' ')}", removed)
    record.text = text
    record.trace.append(TraceEntry(stage, f"{removed} removed"))
    return record


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
    """The share of an item's windows of 32 letters and digits that have to stand together in a document for the item to
    count as found."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise NapkinError("no task is named: give `tasks` files of tasks")
        if not 0 < self.share <= 1:
            raise NapkinError(f"the share of windows is {self.share:g}: use a number above 0, at most 1")

    def apply(self, record: Record) -> Record | Dropped:
        from napkin.data.corpus import Document

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
