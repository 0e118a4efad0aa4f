"""A sample of a pipeline's input: files drawn in proportion to their bytes, of large ones the beginning.

Points are laid through all files at equal distances (systematic sampling with probability proportional to size), and
each stands for as many bytes as lie between two points. So what the documents of a drawn file are per byte that was
read, times these bytes, adds up to an estimate of the whole (Hansen and Hurwitz 1943).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from napkin.curation.pipeline_file import InputOptions
from napkin.curation.reading.documents import read_opened
from napkin.curation.reading.input_file import COMPRESSED, InputFile, open_file
from napkin.curation.reading.set_aside import SetAside, Unreadable
from napkin.curation.record import Record

LEAST_BYTES = 2**23
"""A sample is at least so large: below that a plan would say little, and the whole is done in seconds."""
MOST_BYTES = 2**28
"""The sample is held in memory."""
_POINT_BYTES = 2**14
_LEAST_POINTS, _MOST_POINTS = 64, 4096
_LEAST_PART_BYTES = 2**21
_READ_BYTES = 2**14


@dataclass
class SampledFile:
    """Documents of a drawn file."""

    file: InputFile
    stands_for_bytes: float
    """Of the input, as files have them."""
    read_bytes: int = 0
    seconds: float = 0.0
    """Of reading it."""
    records: list[Record] = field(default_factory=list)

    @property
    def weight(self) -> float:
        """How many documents of the input each of its documents stands for."""
        return self.stands_for_bytes / self.read_bytes if self.read_bytes else 0.0


def draw_files(files: Sequence[InputFile], share: float) -> list[tuple[InputFile, float, int]]:
    """The files to read, the bytes that each stands for, and how many of its bytes are read at most.

    `share` is the wanted part of all bytes. The same files give the same sample.
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
    # A document is whole, and so is the file of one: of a long file at least so much that it has several.
    least = max(_LEAST_PART_BYTES, int(wanted / n_points))
    return [(files[number], n * step, max(least, int(n * wanted / n_points))) for number, n in sorted(hits.items())]


def read_sample(
    files: Sequence[InputFile], options: InputOptions, share: float, on_progress: Callable[[int, int], None]
) -> list[SampledFile]:
    """The documents of the drawn files. What cannot be read is left out, as a pipeline sets it aside.

    `on_progress` is called with the number of files that are read, and of all drawn ones.
    """
    drawn = draw_files(files, share)
    sample: list[SampledFile] = []
    for number, (file, stands_for, most) in enumerate(drawn):
        on_progress(number, len(drawn))
        begin = time.perf_counter()
        sample.append(_read(file, stands_for, most, options))
        sample[-1].seconds = time.perf_counter() - begin
    return sample


def _read(file: InputFile, stands_for: float, most: int, options: InputOptions) -> SampledFile:
    sampled = SampledFile(file, stands_for, file.bytes)
    # What cannot be read is set aside in a pipeline, with what came before it kept.
    with suppress(Unreadable, OSError), open_file(file) as opened:
        # Much is in a few compressed bytes; other readers want as many as they ask for.
        is_compressed = file.name.endswith(COMPRESSED)
        counted = _Counted(opened, most=_READ_BYTES if is_compressed else 2**40)
        for record in read_opened(file, counted, options.limits, options.text_field):
            if isinstance(record, SetAside):
                continue
            # Blocks are read ahead of the documents in them.
            place = counted.n_bytes if is_compressed or not record.offset else record.offset
            if most <= place < file.bytes:
                sampled.read_bytes = place
                break
            record.licence = record.licence or options.licence
            if _is_text(record):
                sampled.records.append(record)
    return sampled


def _is_text(record: Record) -> bool:
    try:
        record.text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Counted:
    """A file that says how many of its bytes were read, and gives at most so many at a time."""

    def __init__(self, file: Any, most: int) -> None:
        self._file, self._most = file, most
        self.n_bytes = 0

    def read(self, n_bytes: int = -1) -> bytes:
        data = self._file.read(min(n_bytes, self._most) if n_bytes >= 0 else n_bytes)
        self.n_bytes += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._file)
