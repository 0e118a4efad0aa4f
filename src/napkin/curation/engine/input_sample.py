"""A sample of a pipeline's input: files drawn in proportion to their bytes, of large ones the beginning.

Points are laid through all files at equal distances (systematic sampling with probability proportional to size), and
each stands for as many bytes as lie between two points. So the figures of a drawn file's documents per byte that was
read, times these bytes, add up to an estimate of the whole (Hansen and Hurwitz 1943).
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from napkin.curation.engine.pipeline_file import InputOptions
from napkin.curation.engine.shard_work import size_of
from napkin.curation.reading.bounded_stream import SetAside, Unreadable, decompressed
from napkin.curation.reading.documents import read_opened, read_stream
from napkin.curation.reading.input_file import COMPRESSED, InputFile, open_file
from napkin.curation.reading.rows import row_count
from napkin.curation.stage import Record

LEAST_BYTES = 2**23
"""A sample is at least so large: below that a plan would say little, and the whole is done in seconds."""
MOST_BYTES = 2**28
"""The most bytes of files that are read, and of decompressed documents that are held."""
_POINT_BYTES = 2**14
_LEAST_POINTS, _MOST_POINTS = 64, 4096
_LEAST_PART_BYTES = 2**21
_READ_BYTES = 2**14
_RECORD_BYTES = 2**10
"""Bytes of a record besides its text: about ten Python objects."""
_SEED = 19_43


@dataclass
class SampledFile:
    """Documents of a drawn file."""

    file: InputFile
    stands_for_bytes: float
    """Bytes of the input, as files have them, that the sample stands for."""
    read_bytes: int = 0
    held_bytes: int = 0
    """Approximate memory that its documents take."""
    spent_bytes: int = 0
    """The part of `MOST_BYTES` that is used: bytes that are held, or were read if they are more."""
    seconds: float = 0.0
    """Seconds that reading it took."""
    records: list[Record] = field(default_factory=list)

    @property
    def weight(self) -> float:
        """The number of documents of the input that each sampled one stands for."""
        return self.stands_for_bytes / self.read_bytes if self.read_bytes else 0.0


def draw_files(files: Sequence[InputFile], share: float) -> list[tuple[InputFile, float, int]]:
    """The files to read, the bytes that each stands for, and how many of its bytes are read, documents being whole.

    `share` is the wanted part of all bytes. The same files give the same sample, of at most MOST_BYTES.
    """
    total = sum(file.bytes for file in files)
    wanted = min(total, max(share * total, min(LEAST_BYTES, total)), MOST_BYTES)
    if wanted >= total:
        return [(file, float(file.bytes), file.bytes) for file in files]
    n_points = int(min(max(wanted / _POINT_BYTES, _LEAST_POINTS), _MOST_POINTS))
    step = total / n_points
    hits: Counter[int] = Counter()
    number, end = 0, files[0].bytes
    for point in range(n_points):
        while (point + 0.5) * step >= end:
            number += 1
            end += files[number].bytes
        hits[number] += 1
    # A document is whole, and so is the file of one: of a long file as much as gives several, where that is possible.
    least = min(_LEAST_PART_BYTES, (MOST_BYTES - wanted) // len(hits))
    return [(files[number], n * step, int(max(least, n * wanted / n_points))) for number, n in sorted(hits.items())]


def read_sample(
    files: Sequence[InputFile], options: InputOptions, share: float, on_progress: Callable[[int, int], None]
) -> list[SampledFile]:
    """The documents of the drawn files, at most MOST_BYTES; what cannot be read is left out.

    Files are read in random order: if documents are larger than expected from their files, so that not all fit, those
    that were read represent the others too. `on_progress` is called with the number of files that are read, and of all
    drawn ones.
    """
    drawn = draw_files(files, share)
    _warm_up([file for file, _, _ in drawn], options)
    order = np.random.default_rng(_SEED).permutation(len(drawn)).tolist()
    sample: dict[int, SampledFile] = {}
    left, wanted = MOST_BYTES, sum(most for _, _, most in drawn)
    for done, number in enumerate(order):
        on_progress(done, len(drawn))
        file, stands_for, most = drawn[number]
        # The first document of the first file is taken, however large.
        room = left * most // max(1, wanted), left if sample else 2**62
        sampled = _read(file, stands_for, most, room, options)
        if sampled is None:
            break
        sample[number] = sampled
        left, wanted = left - sampled.spent_bytes, wanted - most
        if left <= 0:
            break
    share_read = sum(each.stands_for_bytes for each in sample.values()) / max(1, sum(each for _, each, _ in drawn))
    for each in sample.values():
        each.stands_for_bytes /= share_read
    return [sample[number] for number in sorted(sample)]


def _warm_up(files: Sequence[InputFile], options: InputOptions) -> None:
    """Read a document of each kind of file: libraries are imported at first use, which is not of the sample."""
    kinds = {(file.format, file.name.endswith(COMPRESSED), "://" in file.name): file for file in files}
    for file in kinds.values():
        with suppress(Unreadable, OSError, _TooFar), open_file(file) as opened:
            next(iter(read_opened(file, _Counted(opened, file, options), options.limits, options.text_field)), None)


def _read(
    file: InputFile, stands_for: float, most: int, room: tuple[int, int], options: InputOptions
) -> SampledFile | None:
    """About `most` bytes of a file; None if its first document does not fit into what is left.

    `room` are the bytes that its documents may have in memory, and those that are left for all files.
    """
    sampled, begin = SampledFile(file, stands_for, file.bytes), time.perf_counter()
    n_read = 0
    # A pipeline sets unreadable files aside too, and keeps the documents before the damage.
    with suppress(Unreadable, OSError), open_file(file) as opened:
        counted = _Counted(opened, file, options, most)
        try:
            for found, place in _documents(file, counted, options):
                if most <= place < file.bytes or (sampled.records and sampled.held_bytes >= room[0]):
                    sampled.read_bytes = max(1, place)
                    break
                found = _usable(found, options)
                n_bytes = _held_bytes(found) if found else 0
                if sampled.held_bytes + n_bytes > room[1]:
                    if not sampled.records:
                        return None
                    sampled.read_bytes = max(1, place)
                    break
                if found:
                    sampled.records.append(found)
                    sampled.held_bytes += n_bytes
        except _TooFar:
            sampled.read_bytes = min(counted.n_bytes, file.bytes)
        finally:
            n_read = counted.n_bytes
    # Files are read ahead of their documents, and Parquet in whole row groups.
    sampled.seconds = (time.perf_counter() - begin) * min(1.0, sampled.read_bytes / max(1, n_read))
    sampled.spent_bytes = max(sampled.held_bytes, 0 if file.format == "parquet" else n_read)
    return sampled


def _documents(file: InputFile, counted: "_Counted", options: InputOptions) -> Iterator[tuple[Record | SetAside, int]]:
    """The documents of a file, and about how many of its bytes are before each."""
    if file.format == "parquet":
        per_row = file.bytes / max(1, row_count(counted))
        for number, found in enumerate(read_opened(file, counted, options.limits, options.text_field)):
            yield found, int(number * per_row)
        return
    stream = decompressed(counted, options.limits.ratio)
    for found in read_stream(file, stream, options.limits, options.text_field):
        yield found, stream.file_bytes(found.offset)


def _usable(found: Record | SetAside, options: InputOptions) -> Record | None:
    """A document as a pipeline reads it; None for what it sets aside."""
    if isinstance(found, SetAside):
        return None
    found.licence = found.licence or options.licence
    try:
        size_of(found)
    except UnicodeEncodeError:
        return None
    return found


def _held_bytes(record: Record) -> int:
    fields = len(msgspec.msgpack.encode(record.fields)) if record.fields else 0
    return _RECORD_BYTES + sys.getsizeof(record.text) + len(record.content) + 2 * fields


class _TooFar(Exception):
    """Much more of a file was read than is wanted of it, and no document ends there."""


class _Counted:
    """A file that says how many of its bytes were read, and gives few at a time.

    Parquet wants as many as it asks for. Raises _TooFar beyond what the wanted bytes and two documents may take.
    """

    def __init__(self, file: Any, of: InputFile, options: InputOptions, most: int = 0) -> None:
        self._file = file
        is_parquet, is_compressed = of.format == "parquet", of.name.endswith(COMPRESSED)
        # Much is in a few compressed bytes.
        self._most_read = 2**62 if is_parquet else _READ_BYTES if is_compressed else 4 * _READ_BYTES
        self._most = 2**62 if is_parquet else most + 2 * options.document_bytes + 2**20
        self.n_bytes = 0

    def read(self, n_bytes: int = -1) -> bytes:
        if self.n_bytes > self._most:
            raise _TooFar
        data = self._file.read(min(n_bytes, self._most_read) if n_bytes >= 0 else n_bytes)
        self.n_bytes += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file)
