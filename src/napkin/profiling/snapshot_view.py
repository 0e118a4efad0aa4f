"""Views of a memory snapshot: bytes over the allocator's events, and the contents of memory at the peak.

The file may be anyone's: JSON or a pickle of plain data (`napkin.profiling.plain_pickle`), read without running code,
within bounds. Snapshots of torch have them from CUDA's caching allocator, those of `napkin profile` from the CPU's too.

Allocated are the bytes that were asked for and whose release has not been completed; reserved are the segments that the
allocator has of the device. What lies between is fragmentation: rounding, and room in segments that is free.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from markupsafe import Markup

from napkin.accounting.quantities import QuantityRow, QuantityTable, laid_out
from napkin.errors import NapkinError, first_line
from napkin.files import StrPath, atomic_write_text, read_bounded
from napkin.profiling.memory_snapshot import MODULE, OPERATOR
from napkin.profiling.plain_pickle import decode_plain_pickle
from napkin.report.templates import WITHOUT_CHARTS, render
from napkin.report.xy_picture import COLOURS, Series, xy_svg
from napkin.units import format_bytes, format_share

MOST_BYTES = 2**28
MOST_EVENTS = 2**23
MOST_SIZE = 2**50
_MOST_MOMENTS = 1500
_MOST_NAME = 160
_BACKWARD = "autograd::engine::evaluate_function: "
UNKNOWN = "allocated before the history begins"

_ALLOCATES = {"alloc": 1, "free_completed": -1, "free": -1}
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_OTHERS = {"free_requested", "oom", "snapshot"}


class Place(NamedTuple):
    """Where memory was allocated, or what it holds."""

    name: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class SnapshotView:
    """The replay of one device's history."""

    device: int
    devices: int
    allocated: list[int]
    """Bytes after each event, of the start first."""
    reserved: list[int]
    """Bytes of segments at the same moments; empty if the file has no segments."""
    peak_event: int
    """Events before the moment of the most allocated bytes."""
    at_peak: list[Place]
    """Memory in use at the peak, largest first."""

    @property
    def events(self) -> int:
        return len(self.allocated) - 1

    @property
    def peak_bytes(self) -> int:
        return self.allocated[self.peak_event]

    @property
    def reserved_at_peak(self) -> int | None:
        return self.reserved[self.peak_event] if self.reserved else None

    @property
    def fragmentation(self) -> int | None:
        """Reserved minus allocated bytes at the peak."""
        return None if self.reserved_at_peak is None else self.reserved_at_peak - self.peak_bytes


class _Block(NamedTuple):
    bytes: int
    place: str


def read_snapshot(path: StrPath) -> dict[str, Any]:
    """The values of a snapshot, which may be anything but are plain data. Raises NapkinError in one line."""
    data = read_bounded(path, MOST_BYTES, what="a memory snapshot", too_large="record a shorter history")
    if data[:1] == b"\x80":
        values = decode_plain_pickle(data, str(path))
    else:
        try:
            values = msgspec.json.decode(data)
        except (ValueError, RecursionError) as error:
            raise NapkinError(
                f"'{path}' is neither a pickle of plain data nor JSON ({first_line(error)}): name a file of "
                "torch.cuda.memory._dump_snapshot or of napkin profile --memory-snapshot"
            ) from None
    if type(values) is not dict:
        raise _malformed(path, "the file", values, "a dict with segments and device_traces")
    return values


def view_snapshot(path: StrPath, device: int | None = None) -> SnapshotView:
    """Read a snapshot and replay the history of `device`; None is the one with most events.

    Raises NapkinError, naming the place and the value, where the file is not a snapshot or contradicts itself.
    """
    return _Reader(Path(path), read_snapshot(path)).view(device)


class _Reader:
    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.segments = self._list(values.get("segments", []), "segments")
        self.traces = self._list(values.get("device_traces", []), "device_traces")
        if sum(len(self._list(trace, "device_traces")) for trace in self.traces) > MOST_EVENTS:
            raise NapkinError(f"'{path}' has more than {MOST_EVENTS:,} events: record a shorter history")
        self.places: dict[int, str] = {}

    def view(self, device: int | None) -> SnapshotView:
        devices = max([len(self.traces), *(1 + self._device(segment) for segment in self.segments)], default=0)
        if not devices:
            raise NapkinError(f"'{self.path}' has no segments and no events: record a history before the snapshot")
        if device is None:
            device = max(range(len(self.traces)), key=lambda number: len(self.traces[number]), default=0)
        if not 0 <= device < devices:
            raise NapkinError(f"--device is {device}: '{self.path}' has device 0 to {devices - 1}")
        return self._replayed(device, devices)

    def _replayed(self, device: int, devices: int) -> SnapshotView:
        trace = self.traces[device] if device < len(self.traces) else []
        changes = [self._change(event, f"device_traces[{device}][{at}]") for at, event in enumerate(trace)]
        final, reserved_end = self._final(device)
        start = self._alive_at_start(changes, final)
        reserves = [sign * size for kind, sign, _, size, _ in changes if kind == "reserve"]
        has_reserved = bool(self.segments) or bool(reserves)
        allocated, reserved = [sum(block.bytes for block in start.values())], [reserved_end - sum(reserves)]
        live: dict[int, _Block] = dict(start)
        for kind, sign, address, size, place in changes:
            now, kept = allocated[-1], reserved[-1]
            if kind == "allocate" and sign > 0:
                # Where a release is missing, as after a history that began anew, the new block takes the place.
                now += size - live.get(address, _Block(0, "")).bytes
                live[address] = _Block(size, place)
            elif kind == "allocate":
                now -= live.pop(address, _Block(0, "")).bytes
            elif kind == "reserve":
                kept += sign * size
            allocated.append(now)
            reserved.append(kept)
        peak = max(range(len(allocated)), key=allocated.__getitem__)
        alive = dict(start)
        for kind, sign, address, size, place in changes[:peak]:
            if kind == "allocate" and sign > 0:
                alive[address] = _Block(size, place)
            elif kind == "allocate":
                alive.pop(address, None)
        return SnapshotView(device, devices, allocated, reserved if has_reserved else [], peak, _summed(alive))

    def _alive_at_start(
        self, changes: list[tuple[str, int, int, int, str]], final: dict[int, _Block]
    ) -> dict[int, _Block]:
        """Blocks that are freed, or in use at the end, without having been allocated in the history."""
        start: dict[int, _Block] = {}
        live: set[int] = set()
        for kind, sign, address, size, _ in changes:
            if kind != "allocate":
                continue
            if sign > 0:
                live.add(address)
            elif address in live:
                live.remove(address)
            else:
                start.setdefault(address, _Block(size, UNKNOWN))
        return start | {address: block for address, block in final.items() if address not in live}

    def _final(self, device: int) -> tuple[dict[int, _Block], int]:
        """The blocks in use at the end by address, and the bytes of segments."""
        blocks: dict[int, _Block] = {}
        total = 0
        for at, segment in enumerate(self.segments):
            where = f"segments[{at}]"
            if self._device(segment) != device:
                continue
            address = self._integer(segment, "address", where)
            total += self._size(segment, "total_size", where)
            for number, block in enumerate(self._list(segment.get("blocks", []), f"{where}.blocks")):
                place = f"{where}.blocks[{number}]"
                size = self._size(block, "size", place)
                if str(block.get("state", "")).startswith("active"):
                    own = self._integer(block, "address", place) if "address" in block else address
                    asked = self._size(block, "requested_size", place) if "requested_size" in block else size
                    blocks[own] = _Block(asked, self._place(block))
                address += size
        return blocks, total

    def _change(self, event: Any, where: str) -> tuple[str, int, int, int, str]:
        """Return the kind of an event, +1 or -1, its address, size and place."""
        action = event.get("action") if type(event) is dict else None
        if type(action) is not str:
            raise _malformed(self.path, f"{where}.action", action, "the name of an action")
        if action in _ALLOCATES:
            address, size = self._integer(event, "addr", where), self._size(event, "size", where)
            return "allocate", _ALLOCATES[action], address, size, self._place(event) if action == "alloc" else ""
        if action in _RESERVES:
            return "reserve", _RESERVES[action], 0, self._size(event, "size", where), ""
        if action not in _OTHERS and not action.startswith("workspace"):
            raise _malformed(self.path, f"{where}.action", action, "an action that torch writes")
        return "other", 0, 0, 0, ""

    def _place(self, of: dict[str, Any]) -> str:
        """The contents of a block, or the innermost module and operator, or the function that allocated it."""
        category = of.get("user_metadata")
        if type(category) is str and category:
            return category[:_MOST_NAME]
        frames = of.get("frames")
        if type(frames) is not list:
            return UNKNOWN
        key = id(frames)
        if key not in self.places:
            self.places[key] = _place_of(frames)
        return self.places[key]

    def _device(self, segment: Any) -> int:
        return self._integer(segment, "device", "segments", most=1023) if "device" in self._dict(segment) else 0

    def _dict(self, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _malformed(self.path, "segments", value, "dicts")
        return value

    def _list(self, value: Any, where: str) -> list[Any]:
        if type(value) not in (list, tuple):
            raise _malformed(self.path, where, value, "a list")
        return value

    def _size(self, of: Any, name: str, where: str) -> int:
        return self._integer(of, name, where, most=MOST_SIZE)

    def _integer(self, of: Any, name: str, where: str, most: int = 2**64 - 1) -> int:
        value = of.get(name) if type(of) is dict else None
        # Addresses above 2^63 are stored as negative numbers by some writers.
        if type(value) is int and most == 2**64 - 1 and -(2**63) <= value < 0:
            value += 2**64
        if type(value) is not int or not 0 <= value <= most:
            raise _malformed(self.path, f"{where}.{name}", value, f"an integer from 0 to {most:,}")
        return value


def _malformed(path: StrPath, where: str, value: Any, expected: str) -> NapkinError:
    shown = f"{value!r:.60}" if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return NapkinError(f"'{path}' is not a memory snapshot: {where} is {shown}, not {expected}: record it again")


def _place_of(frames: list[Any]) -> str:
    read = [frame for frame in frames[:512] if type(frame) is dict]
    named = [(str(frame.get("filename", "")), str(frame.get("name", "")), frame.get("line", 0)) for frame in read]
    # The outermost of the operators directly around it: what was called, not what that calls.
    operator = ""
    for file, name, _ in named:
        if file != OPERATOR:
            break
        operator = name.removeprefix(_BACKWARD)
    module = next((name for file, name, _ in named if file == MODULE), "")
    if operator or module:
        outer = next(((file, name, line) for file, name, line in named if _is_users(file)), None)
        at = "" if outer is None else _site(*outer)
        return " · ".join(filter(None, (module or at, operator)))[:_MOST_NAME]
    users = next((each for each in named if _is_users(each[0])), None)
    if users is None:
        users = named[0] if named else None
    return _site(*users)[:_MOST_NAME] if users else UNKNOWN


def _is_users(file: str) -> bool:
    """True for a function that is neither torch's nor the interpreter's."""
    is_python = file.endswith(".py") and file not in (OPERATOR, MODULE)
    return is_python and not file.startswith("torch/") and "/torch/" not in file


def _site(file: str, name: str, line: Any) -> str:
    return f"{file.rpartition('/')[2]}:{line if type(line) is int else 0} {name}"


def _summed(blocks: dict[int, _Block]) -> list[Place]:
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for block in blocks.values():
        sums[block.place] += block.bytes
        counts[block.place] += 1
    return [Place(name, size, counts[name]) for name, size in sums.most_common()]


def snapshot_svg(view: SnapshotView) -> str:
    """Allocated and reserved bytes over the events of a snapshot."""
    groups = _groups(view.events + 1)
    x = np.array([max(group, key=view.allocated.__getitem__) for group in groups], dtype=np.float64)
    lows = np.zeros(len(x))
    heights = np.array([max(view.allocated[at] for at in group) for group in groups]) / 1e6
    series = [Series("allocated", x, lows, "vermilion", "band", heights)]
    if view.reserved:
        kept = np.array([max(view.reserved[at] for at in group) for group in groups]) / 1e6
        series.append(Series("reserved", x, kept, "blue", "line"))
    peak = np.array([view.peak_bytes / 1e6])
    series.append(Series("peak", np.array([float(view.peak_event)]), peak, "purple", "points"))
    return xy_svg(
        series,
        title="Bytes over the events of the allocator",
        x_label="events from the begin of the history",
        y_label="MB",
        log_x=False,
        log_y=False,
        width=800,
        height=360,
    )


def _groups(count: int) -> list[range]:
    size = -(-count // _MOST_MOMENTS)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def place_rows(view: SnapshotView, most: int) -> list[tuple[str, ...]]:
    """The rows of a table of what was in use at the peak."""
    shown = view.at_peak[:most]
    rest = view.at_peak[most:]
    if rest:
        shown = [*shown, Place(f"{len(rest)} others", sum(p.bytes for p in rest), sum(p.blocks for p in rest))]
    whole = view.peak_bytes or 1
    return [
        (each.name, format_bytes(each.bytes), format_share(each.bytes / whole), f"{each.blocks:,}") for each in shown
    ]


HEADINGS: tuple[str, ...] = ("in use at the peak", "bytes", "share", "blocks")


def snapshot_lines(view: SnapshotView) -> Iterator[str]:
    """Sentences about a snapshot."""
    of = f" of device {view.device}, one of {view.devices}" if view.devices > 1 else ""
    yield f"{view.events:,} events{of}; most bytes after event {view.peak_event:,}: {format_bytes(view.peak_bytes)}"
    if view.fragmentation is not None and view.reserved_at_peak:
        share = format_share(view.fragmentation / view.reserved_at_peak)
        yield (
            f"reserved then: {format_bytes(view.reserved_at_peak)}; {format_bytes(view.fragmentation)} of it, {share}, "
            "is rounding and free room in segments"
        )


def beside_plan(view: SnapshotView, planned: QuantityRow) -> QuantityTable:
    """Rule, count and meter of the peak; `planned` is the row of a plan."""
    note = "meter: bytes that were asked for, from the snapshot"
    return QuantityTable([QuantityRow("peak bytes", "bytes", planned.rule, planned.count, view.peak_bytes, note)])


def as_values(view: SnapshotView, table: QuantityTable | None) -> dict[str, Any]:
    """The values for --json."""
    return {
        "device": view.device,
        "events": view.events,
        "peak_event": view.peak_event,
        "peak_bytes": view.peak_bytes,
        "reserved_bytes_at_peak": view.reserved_at_peak,
        "in_use_at_peak": [each._asdict() for each in view.at_peak],
        "quantities": [] if table is None else [vars(row) for row in table],
    }


def write_snapshot_page(view: SnapshotView, path: StrPath, *, title: str, table: QuantityTable | None = None) -> Path:
    """Write one HTML file: the picture, the tables. Raises NapkinError where it exists."""
    tables = {"at-peak": ("In use at the peak", HEADINGS, place_rows(view, 50))}
    if table is not None:
        laid = laid_out(table)
        tables["plan"] = ("Beside the plan", tuple(laid.header), [tuple(row) for row in laid.rows])
    sections = {"memory": "Memory over events", **{key: name for key, (name, *_) in tables.items()}}
    keys = [("peak bytes", format_bytes(view.peak_bytes), "")]
    if view.fragmentation is not None:
        keys.append(("fragmentation", format_bytes(view.fragmentation), "reserved minus allocated, at the peak"))
    page = render(
        "profile.html",
        colours=COLOURS,
        title=title,
        device=f"device {view.device}",
        sections=sections,
        keys=keys,
        statements=list(snapshot_lines(view)),
        pictures={"memory": (sections["memory"], Markup(snapshot_svg(view)))},
        notes={"memory": "Of several events in a pixel, the one with most bytes is drawn."},
        tables=tables,
        sums=set[str](),
        outside=[],
        ranks=[],
        **WITHOUT_CHARTS,
    )
    path = Path(path)
    atomic_write_text(path, page)
    return path
