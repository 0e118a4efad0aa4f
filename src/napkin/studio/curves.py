"""The curves of a run in bounded memory: buckets of consecutive logged lines, each with its extremes and its mean.

A bucket holds `width` lines. When a run exceeds twice `BUCKETS`, neighbouring buckets are merged, so that a run of any
length takes bounded memory; up to there a bucket is a line, and nothing is lost. If a view is so narrow that it has too
few buckets, that part is read from the file again, between the offsets of its buckets.

A long file is first seen by a sample of its lines, which takes a millisecond, and read whole afterwards.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from napkin.files import regular
from napkin.runs.metrics import METRICS_FILE, MetricsRecord, parse_metrics
from napkin.runs.metrics import LoggedLine as WholeLine

BUCKETS = 512
"""Buckets per run; up to twice as many are kept."""
FEWEST_BUCKETS = 64
MOST_FIGURES = 256
"""Further figures of a run; files that name more are not of napkin."""
CHUNK = 2**18
LONGEST_LINE = 2**23
SAMPLED_BYTES = 2**20
"""A file with more than this to read is sampled first."""
SAMPLES = 128
MOST_PARSED = 1024
"""Half the most lines of each kind that `telling_lines` parses."""
_CLOSE_BYTES = 2**24
"""The most of a file that is read again for a closer look."""

Values = NDArray[np.float64]
Points = tuple[Values, Values]
"""Positions and values, [points] each."""


_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class LoggedLine(msgspec.Struct, gc=False):
    """The figures of a line of metrics.jsonl that curves show: the others are skipped while it is parsed."""

    step: _Natural
    tokens: _Natural = 0
    seconds: float = 0.0
    loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    bytes: float | None = None
    figures: dict[str, float | None] | None = None


NAMES = tuple(each for each in LoggedLine.__struct_fields__ if each not in ("step", "tokens", "seconds", "figures"))
"""The curves that every run may have, in the order of the fields."""
_DECODER = msgspec.json.Decoder(LoggedLine)
_ANY_ERROR = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError)


def decode_lines(content: bytes) -> tuple[list[LoggedLine], list[int], int]:
    """The lines of a file's part that ends with a line, where each begins in it, and how many are damaged."""
    ends = np.flatnonzero(np.frombuffer(content, dtype=np.uint8) == ord("\n")) + 1
    starts = [0, *ends.tolist()]
    try:
        lines = _DECODER.decode_lines(content)
        if len(lines) == len(starts) - 1:
            return lines, starts[:-1], 0
    except _ANY_ERROR:
        pass
    lines, kept, damaged = [], [], 0
    for start, end in itertools.pairwise(starts):
        line = content[start:end]
        if not line.strip():
            continue
        try:
            lines.append(_DECODER.decode(line))
        except _ANY_ERROR:
            damaged += 1
        else:
            kept.append(start)
    return lines, kept, damaged


@dataclass
class Buckets:
    """The statistics of some curves in some buckets: arrays of [curves, buckets], and [4, buckets] of their starts."""

    starts: Values
    """Step, tokens, seconds, and offset in the file, of each bucket's first line."""
    low: NDArray[np.float32]
    """Infinity where a curve has no value in a bucket; `high` is then minus infinity."""
    high: NDArray[np.float32]
    low_at: NDArray[np.int32]
    """Steps from the bucket's first line to its lowest value."""
    high_at: NDArray[np.int32]
    total: NDArray[np.float32]
    """Sum of a bucket's values."""
    number: NDArray[np.int32]
    """Number of a bucket's values."""

    @classmethod
    def empty(cls, curves: int) -> "Buckets":
        return cls.of_rows(np.empty((4, 0)), np.empty((curves, 0), dtype=np.float32))

    @classmethod
    def of_rows(cls, starts: Values, values: NDArray[np.float32]) -> "Buckets":
        """A bucket for each line, by its values [curves, lines]."""
        known = np.isfinite(values)
        low, high = np.where(known, values, np.float32(np.inf)), np.where(known, values, np.float32(-np.inf))
        at = np.zeros(values.shape, dtype=np.int32)
        return cls(starts, low, high, at, at.copy(), np.where(known, values, np.float32(0)), known.astype(np.int32))

    def __len__(self) -> int:
        return self.starts.shape[1]

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return sum(each.nbytes for each in vars(self).values())

    def part(self, rows: Sequence[int] | slice, begin: int, end: int) -> "Buckets":
        """Some curves between two buckets."""
        arrays = {name: each[rows, begin:end] for name, each in vars(self).items() if name != "starts"}
        return Buckets(self.starts[:, begin:end], **arrays)

    def joined(self, other: "Buckets") -> "Buckets":
        """These buckets followed by others of the same curves."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Buckets(*(np.concatenate(pair, axis=1) for pair in pairs))

    def with_curves(self, number: int) -> "Buckets":
        """These buckets with this many more curves, without values."""
        none = Buckets.of_rows(self.starts, np.full((number, len(self)), np.nan, dtype=np.float32))
        pairs = ((name, np.concatenate((each, getattr(none, name)))) for name, each in vars(self).items())
        return Buckets(self.starts, **{name: each for name, each in pairs if name != "starts"})

    def merged(self, width: int, *, first: int | None = None) -> "Buckets":
        """Each `width` neighbours as one bucket, where the first bucket counts for `first` of them."""
        if width == 1:
            return self
        curves, ahead = len(self.low), 0 if first is None else first - 1
        behind = -(len(self) + ahead) % width
        order = np.concatenate(
            (np.zeros(ahead + 1, dtype=int), np.arange(1, len(self)), np.full(behind, len(self) - 1))
        )
        counts = np.ones(len(order), dtype=np.int32)
        counts[:ahead], counts[len(order) - behind :] = 0, 0
        begins = order[::width]
        within = (self.starts[0, order].reshape(-1, width) - self.starts[0, begins][:, None]).astype(np.int64)

        def extreme(values: NDArray[np.float32], at: NDArray[np.int32], *, lowest: bool) -> list[NDArray]:
            shaped = values[:, order].reshape(curves, -1, width)
            index = (shaped.argmin(2) if lowest else shaped.argmax(2))[..., None]
            where = np.take_along_axis(at[:, order].reshape(curves, -1, width) + within, index, 2)[..., 0]
            limit = np.iinfo(np.int32).max
            return [np.take_along_axis(shaped, index, 2)[..., 0], np.clip(where, -limit, limit).astype(np.int32)]

        low, low_at = extreme(self.low, self.low_at, lowest=True)
        high, high_at = extreme(self.high, self.high_at, lowest=False)
        total = (self.total[:, order] * counts).reshape(curves, -1, width).sum(2, dtype=np.float32)
        number = (self.number[:, order] * counts).reshape(curves, -1, width).sum(2, dtype=np.int32)
        return Buckets(self.starts[:, begins], low, high, low_at, high_at, total, number)


AXES = {"steps": 0, "tokens": 1, "seconds": 2}


class Curves:
    """The curves of a run, or of a sample of its lines, as buckets."""

    def __init__(self, most: int = BUCKETS) -> None:
        self.names = list(NAMES)
        self.buckets = Buckets.empty(len(NAMES))
        self.most, self.width, self.rows = most, 1, 0
        self.last = np.zeros(4)
        """Step, tokens, seconds and offset of the last line."""

    def extend(self, lines: Sequence[LoggedLine], offsets: Sequence[int]) -> None:
        """Add lines, which begin at these offsets of the file."""
        if not lines:
            return
        self._know(lines)
        columns = [*zip(*map(msgspec.structs.astuple, lines), strict=True)]
        starts = np.array([*columns[:3], offsets], dtype=np.float64)
        values = np.full((len(self.names), len(lines)), np.nan)
        # numpy makes NaN of None.
        values[: len(NAMES)] = np.array(columns[3 : 3 + len(NAMES)], dtype=np.float64)
        places = {name: row for row, name in enumerate(self.names) if row >= len(NAMES)}
        for column, line in enumerate(lines) if places else ():
            for name, value in (line.figures or {}).items():
                if value is not None and name in places:
                    values[places[name], column] = value
        with np.errstate(over="ignore"):
            new = Buckets.of_rows(starts, values.astype(np.float32))
        self.last = starts[:, -1]
        begun = self.rows % self.width
        if begun:
            open_one = self.buckets.part(slice(None), -1, len(self.buckets))
            new = open_one.joined(new).merged(self.width, first=begun)
            self.buckets = self.buckets.part(slice(None), 0, -1)
        else:
            new = new.merged(self.width)
        self.buckets = self.buckets.joined(new)
        self.rows += len(lines)
        self.keep(self.most)

    def _know(self, lines: Sequence[LoggedLine]) -> None:
        """Make room for figures that no line before had. One that is called as a curve is shown once."""
        found = dict.fromkeys(name for line in lines if line.figures for name in line.figures)
        new = [name for name in found if name not in self.names][: MOST_FIGURES + len(NAMES) - len(self.names)]
        if new:
            self.names += new
            self.buckets = self.buckets.with_curves(len(new))

    def keep(self, most: int) -> None:
        """Merge neighbours until there are at most twice `most` buckets."""
        self.most = most
        while len(self.buckets) > 2 * most:
            self.buckets = self.buckets.merged(2)
            self.width *= 2

    def within(self, positions: Values, begin: float, end: float) -> tuple[int, int]:
        """The buckets that a part of an axis touches, by the positions of all, and one more on each side."""
        first = int(np.searchsorted(positions, begin, side="left")) - 2
        return max(0, first), min(len(positions), int(np.searchsorted(positions, end, side="right")) + 1)

    def positions(self, axis: str) -> Values:
        """Where the buckets begin on an axis, [buckets], ascending."""
        return np.maximum.accumulate(self.buckets.starts[AXES[axis]])

    def points(
        self, name: str, axis: str, most: int, begin: float = -math.inf, end: float = math.inf, *, means: bool = False
    ) -> Points:
        """A curve between two positions of an axis: at most about `most` points, of which each interval's lowest and
        highest are two; with `means` one point is the interval's mean."""
        if name not in self.names or not self.rows:
            return np.empty(0), np.empty(0)
        along = self.positions(axis)
        first, stop = self.within(along, begin, end)
        shown = self.buckets.part([self.names.index(name)], first, stop)
        shown = shown.merged(max(1, math.ceil(len(shown) * (1 if means else 2) / most))) if len(shown) > most else shown
        if means:
            known = shown.number[0] > 0
            middle = (shown.starts[0] + np.append(shown.starts[0, 1:], self._end_of(stop))) / 2
            steps = np.where(shown.low_at[0] == shown.high_at[0], shown.starts[0] + shown.low_at[0], middle)[known]
            values = shown.total[0, known] / shown.number[0, known]
        else:
            at = np.stack((shown.low_at[0], shown.high_at[0]))
            order = np.argsort(at, axis=0, kind="stable")
            steps = (shown.starts[0] + np.take_along_axis(at, order, 0)).T.ravel()
            values = np.take_along_axis(np.stack((shown.low[0], shown.high[0])), order, 0).T.ravel()
            known = np.isfinite(values)
            known[1::2] &= at[0] != at[1]
            steps, values = steps[known], values[known]
        if axis != "steps":
            knots = np.append(self.positions("steps"), self.last[0])
            steps = np.interp(steps, knots, np.append(along, self.last[AXES[axis]]))
        return steps, values.astype(np.float64)

    def _end_of(self, stop: int) -> float:
        return float(self.buckets.starts[0, stop] if stop < len(self.buckets) else self.last[0])


class FollowedRun:
    """A run's metrics.jsonl as it grows: its curves, and how much of the file they are."""

    def __init__(self, path: Path, most: int = BUCKETS) -> None:
        self.path = path / METRICS_FILE
        self.most = most
        self._forget()
        self.inode = 0

    def _forget(self) -> None:
        self.curves, self.offset, self.damaged = Curves(self.most), 0, 0
        self.is_whole = False

    @property
    def size(self) -> int:
        """Bytes of the curves."""
        return self.curves.buckets.size

    def look(self) -> bool:
        """Read what the file has more than before, or a sample where that is much; True if there is more to read.

        A file that was replaced, as a resumed run does, is read from its beginning.
        """
        try:
            with open(self.path, "rb", opener=regular) as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self.inode or stat.st_size < self.offset:
                    self._forget()
                    self.inode = stat.st_ino
                if self.is_whole or stat.st_size <= SAMPLED_BYTES:
                    self._read_on(file.fileno())
                    self.is_whole = True
                elif not self.curves.rows:
                    lines, offsets = sample(file.fileno(), stat.st_size)
                    self.curves.extend(lines, offsets)
        except OSError:
            return False
        return not self.is_whole

    def keep(self, most: int) -> None:
        """Keep no more than twice so many buckets, now and as the run grows."""
        self.most = most
        self.curves.keep(most)

    def whole(self, pause: Callable[[], object] = lambda: None) -> "FollowedRun":
        """The run, read whole from its beginning, as a new object. `pause` is called before each part of the file, and
        returns when there is time for it."""
        followed = FollowedRun(self.path.parent, self.most)
        try:
            with open(self.path, "rb", opener=regular) as file:
                followed.inode = os.fstat(file.fileno()).st_ino
                followed._read_on(file.fileno(), pause)
        except OSError:
            pass
        followed.is_whole = True
        return followed

    def _read_on(self, descriptor: int, pause: Callable[[], object] = lambda: None) -> None:
        for start, content in _whole_lines(descriptor, self.offset):
            pause()
            lines, offsets, damaged = decode_lines(content)
            if self.offset == 0 and not self.is_whole:
                # A sample is replaced by what is read.
                self.curves = Curves(self.most)
            self.curves.extend(lines, [start + each for each in offsets])
            self.damaged += damaged
            self.offset = start + len(content)

    def closer(self, axis: str, begin: float, end: float, points: int) -> Curves:
        """The curves to look at for a part of an axis: those at hand, or that part of the file if it is coarse."""
        curves = self.curves
        if curves.width == 1 or not self.is_whole:
            return curves
        first, stop = curves.within(curves.positions(axis), begin, end)
        if 4 * (stop - first) > points:
            return curves
        offsets = curves.buckets.starts[3]
        from_byte, to_byte = int(offsets[first]), int(offsets[stop]) if stop < len(offsets) else self.offset
        if to_byte - from_byte > _CLOSE_BYTES:
            return curves
        found = Curves(max(BUCKETS, points))
        try:
            with open(self.path, "rb", opener=regular) as file:
                if os.fstat(file.fileno()).st_ino != self.inode:
                    return curves
                lines, places, _ = decode_lines(os.pread(file.fileno(), to_byte - from_byte, from_byte))
        except OSError:
            return curves
        found.extend(lines, [from_byte + each for each in places])
        return found if found.rows else curves


_TELLING = (b'"validation_loss": ', b'"loss": null', b'"held-out')
"""Marks of the lines of evaluations and of losses that were not finite."""


def telling_lines(path: Path, most: int = MOST_PARSED) -> MetricsRecord:
    """A metrics.jsonl by a part of its lines, in bounded memory: those of evaluations and of losses that were not
    finite, the last one, and others at equal distances; at most four times `most`. Damaged lines are left out unnamed.
    """
    plain, telling = _Thinned(most), _Thinned(most)
    number, line = 0, b""
    try:
        with open(path, "rb", opener=regular) as file:
            for _, content in _whole_lines(file.fileno(), 0):
                for line in content.splitlines():
                    number += 1
                    (telling if any(mark in line for mark in _TELLING) else plain).add(number, line)
    except OSError:
        pass
    by_step: dict[int, WholeLine] = {}
    for at, kept in sorted({**plain.lines, **telling.lines, number: line}.items()):
        try:
            metrics = parse_metrics(kept)
        except _ANY_ERROR:
            continue
        by_step[metrics.step] = WholeLine(metrics, at, None, kept)
    lines = [by_step[step] for step in sorted(by_step)]
    return MetricsRecord(path, lines=lines, left_out=number - len(lines))


class _Thinned:
    """Every n-th of some lines by their numbers, where n doubles as they become more than twice `most`."""

    def __init__(self, most: int) -> None:
        self.most, self.every, self.seen = most, 1, 0
        self.lines: dict[int, bytes] = {}

    def add(self, number: int, line: bytes) -> None:
        if self.seen % self.every == 0:
            self.lines[number] = line
            if len(self.lines) > 2 * self.most:
                self.lines = dict([*self.lines.items()][::2])
                self.every *= 2
        self.seen += 1


def _whole_lines(descriptor: int, offset: int) -> Iterator[tuple[int, bytes]]:
    """Parts of a file from an offset that end with a line, and where they begin. A line that a process is writing right
    now is left for the next time; a line longer than any of napkin's is returned in pieces, which count as damaged
    lines."""
    size = CHUNK
    while content := os.pread(descriptor, size, offset):
        cut = content.rfind(b"\n") + 1
        if not cut and len(content) == size < LONGEST_LINE:
            size = min(2 * size, LONGEST_LINE)
            continue
        if not cut and len(content) < LONGEST_LINE:
            return
        yield offset, content[:cut] or content[:-1] + b"\n"
        offset, size = offset + (cut or len(content)), CHUNK


def sample(descriptor: int, size: int) -> tuple[list[LoggedLine], list[int]]:
    """Intact lines at equal distances in a file, with the last one, and their offsets."""
    lines, offsets = [], []
    for number in range(SAMPLES):
        start = number * size // SAMPLES
        for length in (2**12, 2**17):
            content = os.pread(descriptor, length, start)
            begin = content.find(b"\n") + 1 if start else 0
            end = content.find(b"\n", begin)
            if end >= 0 and (begin or not start):
                break
        else:
            continue
        try:
            line = _DECODER.decode(content[begin:end])
        except _ANY_ERROR:
            continue
        if not lines or line.step > lines[-1].step:
            lines.append(line)
            offsets.append(start + begin)
    last = last_lines(descriptor, size)
    if last and lines and last[-1].step > lines[-1].step:
        lines.append(last[-1])
        offsets.append(size)
    return lines, offsets


def last_lines(descriptor: int, size: int, length: int = 2**16) -> list[LoggedLine]:
    """The intact lines at the end of a file."""
    content = os.pread(descriptor, length, max(0, size - length))
    content = content[: content.rfind(b"\n") + 1]
    return decode_lines(content)[0] if content else []
