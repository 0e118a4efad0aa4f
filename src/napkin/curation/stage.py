"""Stages and records: a stage of a pipeline is a pure function of records and options.

A record is a document on its way from a raw page to a corpus: its text, where it comes from, and what each stage did to
it. Between two passes records are MessagePack, each preceded by its length, in one zstd stream: only the pipeline that
wrote such files reads them; a truncated file is an error.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from napkin.errors import CorruptFile, zstandard


@dataclass(slots=True)
class TraceEntry:
    """The work of one stage on a record; `dropped` says why the record ended there, and is empty where it went on."""

    stage: str
    note: str = ""
    dropped: str = ""


@dataclass(slots=True)
class Record:
    """A document with its provenance.

    `identity` is unique in a pipeline and the same in every run of it: the name of the input, `#`, and the document's
    number in it. `content` is what was read before a stage made text of it (an HTML page, a PDF), empty afterwards.
    `fields` holds what stages found (language, scores) and what the input said of the document, as JSON values.
    """

    identity: str
    text: str = ""
    content: bytes = b""
    media_type: str = "text/plain"
    source: str = ""
    """The file that it was read from, as the user named it."""
    offset: int = 0
    """Bytes from the beginning of the (decompressed) file to the document."""
    address: str = ""
    """The URL where the document was published, if known."""
    licence: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    trace: list[TraceEntry] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dropped:
    """Why a stage does not let a record go on: the name of a rule, and the value that it found."""

    rule: str
    """A name from a small set, by which drops are counted: `mean word length`."""
    detail: str = ""
    """A detail of this one record for people: `14.2 > 10`."""


@runtime_checkable
class RecordStage(Protocol):
    """A stage that looks at one record at a time. Its options are the fields of a frozen dataclass.

    `apply` changes the record in place or gives another, or says why it is dropped. The result depends on the record
    and the options alone: no clock, no random state, no order of calls.
    """

    name: ClassVar[str]

    def apply(self, record: Record) -> Record | Dropped:
        """The record as it is passed on, or why it is dropped."""
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
        """Yield for each record of a shard, in order, the record as it goes on, or why it does not."""
        ...


_LENGTH_BYTES = 8
_LEVEL = 1
"""These files are read once: speed counts more than size."""


@contextmanager
def record_writer(path: Path) -> Iterator[Callable[[Record], None]]:
    """Open a writer of records to a new file, which is whole when the block ends; the caller syncs it to disk."""
    encode = msgspec.msgpack.Encoder().encode
    with open(path, "xb") as file, zstandard().ZstdCompressor(level=_LEVEL).stream_writer(file) as stream:

        def write(record: Record) -> None:
            data = encode(record)
            stream.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
            stream.write(data)

        yield write


def read_record_file(path: Path) -> Iterator[Record]:
    """The records of a file, one at a time. Raises CorruptFile where it was cut off."""
    decoder = msgspec.msgpack.Decoder(Record)
    with open(path, "rb") as file, zstandard().ZstdDecompressor().stream_reader(file) as stream:
        while length := _exactly(stream, _LENGTH_BYTES, path, may_end=True):
            yield decoder.decode(_exactly(stream, int.from_bytes(length, "little"), path))


def _exactly(stream: Any, n_bytes: int, path: Path, *, may_end: bool = False) -> bytes:
    data = stream.read(n_bytes)
    while len(data) < n_bytes:
        more = stream.read(n_bytes - len(data))
        if not more:
            if may_end and not data:
                break
            raise CorruptFile(f"'{path}' was cut off: remove the folder it is in, and run the pipeline again")
        data += more
    return data
