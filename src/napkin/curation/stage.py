"""What a stage of a pipeline is: a pure function of records and options."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from napkin.curation.record import Record


@dataclass(frozen=True, slots=True)
class Dropped:
    """Why a stage does not let a record go on: the name of a rule, and the value that it found."""

    rule: str
    """A name from a small set, by which drops are counted: `mean word length`."""
    detail: str = ""
    """What a person wants to know of this one record: `14.2 > 10`."""


@runtime_checkable
class RecordStage(Protocol):
    """A stage that looks at one record at a time. Its options are the fields of a frozen dataclass.

    `apply` changes the record in place or gives another, or says why it is dropped. The result depends on the record
    and the options alone: no clock, no random state, no order of calls.
    """

    name: ClassVar[str]

    def apply(self, record: Record) -> Record | Dropped:
        """The record as it goes on, or why it does not."""
        ...


@runtime_checkable
class CorpusStage(Protocol):
    """A stage that has to see all shards before it decides: deduplication.

    Three parts: each shard is summarized alone, the summaries of all shards are decided upon at once in bounded memory,
    and each shard is rewritten alone by what was decided. Each part is a pure function of its files and the options.
    """

    name: ClassVar[str]

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        """Write what has to be known of a shard's records to the new file `summary`."""
        ...

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        """Read the summaries of all shards and write a file of decisions for each, in at most `memory` bytes.

        `scratch` is an empty folder for what does not fit into memory.
        """
        ...

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        """For each record of a shard, in order: the record as it goes on, or why it does not."""
        ...
