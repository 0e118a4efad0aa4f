"""The files that deduplication keeps of a shard: the keys of its documents or lines, and the decisions on them.

A file of keys:

    one line of JSON: {"format": "napkin keys", "version": 1, "definition": ..., "tables": b, "width": w}
    chunks of up to 65,536 documents, little-endian:
        int64: n, bytes of identities
        n int64: values: of a document the characters of its text, of a line where it is
        n + 1 int64: where each identity ends, from 0
        b · n · w uint64: keys, table by table
        the identities, one after another, as UTF-8
    int64: 0, number of documents: the end

A key is one or two uint64; two documents are equal in a table if their keys are. The key 0 belongs to no document.
Lines have no identities: theirs are empty.

An index is a folder with the keys of earlier runs, against which later ones are compared, and which they extend:

    000000-0123456789abcdef/00000.keys, 00001.keys ...: the keys of the first run that extended it
    000001-.../

A generation is named by its number and by a hash of its keys. A run that is made again, because it was killed or its
pipeline has changed behind the stage, finds its own generation, and is compared with those before it alone: the result
is the same.

A file of verdicts has a line per record that does not stay as it is, in their order; a record is its number in the
shard:

    {"format": "napkin verdicts", "version": 1, "stage": ..., "records": n}
    [record, what was decided]
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.curation.stage import Record
from napkin.errors import NapkinError
from napkin.files import atomic_file, draft_folder, publish, refuse_irregular, regular, sync_file, try_lock

CHUNK = 65_536
_LONGEST_HEADER = 4096

Keys = NDArray[np.uint64]


class KeyHeader(msgspec.Struct, frozen=True):
    """Says how the keys of a file are made; only files of equal headers can be compared."""

    definition: str
    """The options on which keys depend, as text."""
    tables: int
    width: int
    format: str = "napkin keys"
    version: int = 1


@dataclass
class KeyChunk:
    """Some documents: identities, values of shape [n], keys of shape [tables, n, width]."""

    identities: list[str]
    values: NDArray[np.int64]
    keys: Keys


def write_keys(path: Path, header: KeyHeader, chunks: Iterable[KeyChunk]) -> None:
    """Write a new file of keys; it appears whole or not at all. A chunk has at most 65,536 documents."""
    count = 0
    with atomic_file(path) as file:
        file.write(msgspec.json.encode(header) + b"\n")
        for chunk in chunks:
            identities = [each.encode("utf-8", "surrogatepass") for each in chunk.identities]
            n = len(identities)
            if not n:
                continue
            ends = np.zeros(n + 1, np.int64)
            np.cumsum([len(each) for each in identities], out=ends[1:])
            for array in (np.array([n, ends[-1]], np.int64), chunk.values, ends, chunk.keys):
                file.write(np.ascontiguousarray(array).data)
            file.write(b"".join(identities))
            count += n
        file.write(np.array([0, count], np.int64).data)


class KeyFile:
    """A file of keys, mapped into memory. Raises NapkinError if it is none, or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_irregular(path)
        if not path.stat().st_size:
            raise self._damaged("it is empty")
        self._bytes: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, "r"))
        line = bytes(self._bytes[:_LONGEST_HEADER]).partition(b"\n")[0]
        try:
            self.header = msgspec.json.decode(line, type=KeyHeader)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._damaged("its first line is not that of a file of keys") from error
        if (self.header.format, self.header.version) != ("napkin keys", 1):
            raise self._damaged(f"its format is {self.header.format!r}, version {self.header.version}")
        if not (1 <= self.header.tables <= 4096 and self.header.width in (1, 2)):
            raise self._damaged(f"it has {self.header.tables} tables of width {self.header.width}")
        self._chunks = list(self._find_chunks(len(line) + 1))
        self.starts = np.cumsum([0, *(n for _, n, _ in self._chunks)])
        """The number of the first document of each chunk, and that of documents."""
        if self._total != len(self):
            raise self._damaged(f"it names {self._total} documents and has {len(self)}")

    def __len__(self) -> int:
        return int(self.starts[-1])

    def tables(self, table: int) -> Iterator[Keys]:
        """The keys of one table, a chunk at a time, each of shape [n, width]."""
        width = self.header.width
        for offset, n, _ in self._chunks:
            first = offset + 8 * (2 + n + n + 1 + table * n * width)
            yield self._array(first, n * width, np.uint64).reshape(n, width)

    def values(self, chunk: int) -> NDArray[np.int64]:
        offset, n, _ = self._chunks[chunk]
        return self._array(offset + 16, n, np.int64)

    def identity(self, number: int) -> str:
        chunk = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.identities(chunk, [number - int(self.starts[chunk])])[0]

    def identities(self, chunk: int, places: list[int]) -> list[str]:
        offset, n, size = self._chunks[chunk]
        ends = self._array(offset + 8 * (2 + n), n + 1, np.int64)
        first, last = ends[places].tolist(), ends[1:][places].tolist()
        if not all(0 <= a <= b <= size for a, b in zip(first, last, strict=True)):
            raise self._damaged("an identity lies outside of it")
        begin = offset + 8 * (2 + n + n + 1 + self.header.tables * n * self.header.width)
        names = self._bytes.data[begin : begin + size]
        return [str(names[a:b], "utf-8", "surrogatepass") for a, b in zip(first, last, strict=True)]

    def _find_chunks(self, offset: int) -> Iterator[tuple[int, int, int]]:
        """(offset, documents, bytes of identities) of each chunk."""
        per_document = 8 * (2 + self.header.tables * self.header.width)
        while offset + 16 <= len(self._bytes):
            n, size = self._array(offset, 2, np.int64).tolist()
            if n == 0:
                self._total = size
                return
            if not (0 < n <= CHUNK and size >= 0):
                break
            yield offset, n, size
            offset += 24 + n * per_document + size
        raise self._damaged("it ends too early")

    def _array(self, offset: int, count: int, kind: Any) -> Any:
        return self._bytes[offset : offset + 8 * count].view(kind)

    def _damaged(self, why: str) -> NapkinError:
        return NapkinError(f"{str(self.path)!r} is not a whole file of keys ({why}): make it again")


def open_key_files(paths: Iterable[Path]) -> list[KeyFile]:
    """Open files of keys that belong together; raises NapkinError for one whose keys were made with other options."""
    files = [KeyFile(path) for path in paths]
    for file in files:
        if file.header != files[0].header:
            raise NapkinError(
                f"{str(file.path)!r} has keys of {file.header.definition!r}, "
                f"{str(files[0].path)!r} those of {files[0].header.definition!r}: use the same options"
            )
    return files


_GENERATION = re.compile(r"(\d{6})-([0-9a-f]{16})")


@contextmanager
def extended_index(folder: str, summaries: Sequence[Path]) -> Iterator[list[list[Path]]]:
    """The files of keys of each earlier run in an index, made if it is missing; none where `folder` is empty.

    At the end of the block the keys of this run, `summaries`, are added as a generation, whole or not at all, unless
    they are there already. Raises NapkinError while another process uses the index.
    """
    if not folder:
        yield []
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(descriptor):
            raise NapkinError(f"the index {folder!r} is used by another process: wait for it, or name another folder")
        # The contents of the files, in whichever order they are given.
        digest = hashlib.sha256(b"".join(sorted(map(_digest_of, summaries)))).hexdigest()[:16]
        generations = sorted(each.name for each in path.iterdir() if _GENERATION.fullmatch(each.name))
        own = next((name for name in generations if name.endswith(digest)), None)
        yield [sorted((path / name).glob("*.keys")) for name in generations if own is None or name < own]
        if own is None:
            generation = path / f"{len(generations):06d}-{digest}"
            with draft_folder(generation) as draft:
                for number, summary in enumerate(summaries):
                    copy = draft / f"{number:05d}.keys"
                    shutil.copyfile(summary, copy)
                    sync_file(copy)
                publish(draft, generation)
    finally:
        os.close(descriptor)


def _digest_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


class VerdictHeader(msgspec.Struct, frozen=True):
    """The first line of a file of verdicts."""

    stage: str
    records: int
    format: str = "napkin verdicts"
    version: int = 1


def write_verdicts(path: Path, stage: str, records: int, verdicts: Iterable[tuple[int, Any]]) -> None:
    """Write a new file of verdicts (record, what was decided) about the records of a shard, in their order."""
    with atomic_file(path) as file:
        file.write(msgspec.json.encode(VerdictHeader(stage, records)) + b"\n")
        for verdict in verdicts:
            file.write(msgspec.json.encode(verdict) + b"\n")


def with_verdicts(records: Iterable[Record], path: Path, stage: str, kind: Any) -> Iterator[tuple[Record, Any]]:
    """Each record of a shard with its decision, of type `kind`; None for a record that stays.

    Raises NapkinError if the file is not one of this stage and of as many records.
    """

    def wrong(why: str) -> NapkinError:
        return NapkinError(f"{str(path)!r} does not have the decisions of '{stage}' ({why}): make it again")

    def decoded(line: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise wrong(str(error)) from error

    with open(path, "rb", opener=regular) as file:
        header = decoded(file.readline(), VerdictHeader)
        if (header.format, header.version, header.stage) != ("napkin verdicts", 1, stage):
            raise wrong(f"it is of {header.format!r}, version {header.version}, stage {header.stage!r}")
        lines = (decoded(line, tuple[int, kind]) for line in file)
        following = next(lines, None)
        count = 0
        for number, record in enumerate(records):
            count += 1
            verdict = None
            if following and following[0] == number:
                verdict, following = following[1], next(lines, None)
            yield record, verdict
        if count != header.records or following:
            raise wrong(f"it is of {header.records} records, the shard has {count}")
