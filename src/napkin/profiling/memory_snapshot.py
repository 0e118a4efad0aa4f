"""A step's allocations in the format of torch's memory snapshots, which pytorch.org/memory_viz draws.

A snapshot has the blocks that are in use at its end, in segments, and what happened before, oldest first:

    {"segments": [{"address", "total_size", "device", "stream", "blocks": [{"address", "size", "state", "frames"}]}],
     "device_traces": [[{"action": "alloc", "addr", "size", "stream", "time_us", "frames"}]]}

On CUDA torch writes it from the caching allocator's own history. On a CPU it is made here of the events of the CPU's
allocator, as torch's profiler sees them: each allocation is a segment of its own, as nothing is cached. Its frames are
the operators, modules and functions around it, the innermost first. Of memory from before the step there is what the
step uses, or frees.
"""

import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from napkin.accounting.ledger import Category
from napkin.accounting.memory import Within, allocator_profile, own_changes, profiler_events, tensors_alive
from napkin.accounting.metering import StepMeasurement, meter_step
from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_bytes
from napkin.profiling.plain_pickle import encode_plain_pickle

Frame = dict[str, Any]
"""filename, line, name; of an operator or a module the file name says so."""

MODULE, OPERATOR = "module", "operator"
_FREED = "napkin: freed "
_BACKWARD = "autograd::engine::evaluate_function"
_HERE, _OUTERMOST = "memory_snapshot.py", "_cpu_snapshot"
_MOST_EVENTS = 2_000_000
_GRANULE = 64
"""Bytes: the CPU's allocator aligns to them."""


@dataclass(frozen=True)
class MemorySnapshot:
    """A step's snapshot, and the meter of the step."""

    values: dict[str, Any]
    """The snapshot in torch's form: dicts, lists, strings and numbers."""
    measured: StepMeasurement
    """The step before, recorded operator by operator."""


def record_snapshot(step: Callable[[], Any], module: nn.Module, device: torch.device) -> MemorySnapshot:
    """Run a training step of `module` twice, to meter it and to take its snapshot.

    It should have run a few times before: the first step makes the optimizer's state.

    Raises NapkinError where a profiler is running already.
    """
    measured = meter_step(module, step, device_type=device.type)
    if device.type == "cuda":
        return MemorySnapshot(_cuda_snapshot(step, device), measured)
    return MemorySnapshot(_cpu_snapshot(step, module, measured.residents), measured)


def write_memory_snapshot(snapshot: MemorySnapshot, path: StrPath) -> Path:
    """Write a snapshot: JSON where the name ends so, else a pickle of plain data. Raises NapkinError if it exists."""
    path = Path(path)
    if path.suffix == ".json":
        atomic_write_bytes(path, json.dumps(snapshot.values, separators=(",", ":")).encode())
    else:
        atomic_write_bytes(path, encode_plain_pickle(snapshot.values))
    return path


def _cuda_snapshot(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    torch.cuda.synchronize(device)
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=_MOST_EVENTS)
    try:
        step()
        torch.cuda.synchronize(device)
        return dict(torch.cuda.memory._snapshot(device))
    finally:
        torch.cuda.memory._record_memory_history(None)


def _cpu_snapshot(step: Callable[[], Any], module: nn.Module, used: dict[int, Category]) -> dict[str, Any]:
    residents = _Residents(tensors_alive({torch.device("cpu")}))
    with residents.watched(), allocator_profile(with_stack=True) as profiler:
        if profiler is None:
            raise NapkinError("memory snapshot: another profiler is running: end it before the step")
        step()
    freed = residents.freed_events(profiler)
    frames = _Frames(module, profiler)
    changes = own_changes(profiler)
    if len(changes) > _MOST_EVENTS:
        raise NapkinError(f"memory snapshot: a step with {len(changes):,} allocations: at most {_MOST_EVENTS:,}")
    begin = min([change.time for change in changes] + [time for time, _ in freed], default=0)
    trace: list[dict[str, Any]] = []
    live: dict[int, dict[str, Any]] = {}
    addresses = _Addresses()
    for number in residents.of(set(used) | {residents.addresses[each] for _, each in freed}):
        size, address = residents.sizes[number], residents.addresses[number]
        live[-1 - number] = _block(addresses.give(size), size, [], used.get(address, "inputs"))
    happened = [(change.time, change.pointer, change.bytes, change.within) for change in changes]
    happened += [(time, -1 - number, -1, None) for time, number in freed if -1 - number in live]
    for time, key, size, within in sorted(happened, key=lambda each: each[0]):
        common = {"stream": 0, "time_us": (time - begin) // 1000, "frames": frames.of(within)}
        if size > 0:
            block = live[key] = _block(addresses.give(size), size, common["frames"], "")
            actions = ("segment_alloc", "alloc")
        else:
            block = live.pop(key)
            addresses.take_back(block["address"], block["size"])
            actions = ("free_requested", "free_completed", "segment_free")
        where = {"addr": block["address"], "size": block["size"]}
        trace += [{"action": action, **where, **common} for action in actions]
    return {"segments": [_segment(block) for block in live.values()], "device_traces": [trace]}


def _block(address: int, size: int, frames: list[Frame], category: str) -> dict[str, Any]:
    metadata = {"user_metadata": category} if category else {}
    common = {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
    return {**common, "frames": frames, **metadata}


def _segment(block: dict[str, Any]) -> dict[str, Any]:
    size = block["size"]
    return {
        "device": 0,
        "address": block["address"],
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [block],
    }


class _Addresses:
    """Addresses of a snapshot: dense, so that its blocks can be drawn beside each other; freed ones are used again."""

    def __init__(self) -> None:
        self.end = 2**32
        self.free: dict[int, list[int]] = {}

    def give(self, size: int) -> int:
        room = _room(size)
        if self.free.get(room):
            return self.free[room].pop()
        address, self.end = self.end, self.end + room
        return address

    def take_back(self, address: int, size: int) -> None:
        self.free.setdefault(_room(size), []).append(address)


def _room(size: int) -> int:
    return -(-max(size, 1) // _GRANULE) * _GRANULE


class _Residents:
    """The storages from before a step; the profiler's events have a mark where one of them is freed.

    The profiler itself does not know the size of memory that it has not seen being allocated.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.sizes: list[int] = []
        self.addresses: list[int] = []
        self.storages: list[Any] = []
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                self.sizes.append(storage.nbytes())
                self.addresses.append(storage._cdata)
                self.storages.append(weakref.ref(storage, _marking(len(self.storages))))

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.storages.clear()

    def freed_events(self, profiler: Any) -> list[tuple[int, int]]:
        """Time and number of the freed blocks."""
        marks = ((event.start_time_ns, event.name) for event, _ in profiler_events(profiler))
        return [(time, int(name.removeprefix(_FREED))) for time, name in marks if name.startswith(_FREED)]

    def of(self, addresses: set[int]) -> Iterator[int]:
        """The numbers of the storages at these addresses."""
        return (number for number, address in enumerate(self.addresses) if address in addresses)


def _marking(number: int) -> Callable[[Any], None]:
    def mark(_: Any) -> None:
        with torch.profiler.record_function(f"{_FREED}{number}"):
            pass

    return mark


class _Frames:
    """Lists of frames, one for all allocations from the same place, so that a snapshot stores it once."""

    def __init__(self, module: nn.Module, profiler: Any) -> None:
        self.parts = {id(part): name for name, part in module.named_modules()}
        self.frames: dict[tuple[str, int, str], Frame] = {}
        self.lists: dict[tuple[int, ...], list[Frame]] = {}
        self.modules: dict[int, Frame] = {}
        """Module of the forward pass, by autograd's sequence number of its backward pass."""
        for event, within in profiler_events(profiler):
            number = getattr(event.extra_fields, "sequence_number", -1)
            if number >= 0 and number not in self.modules and not event.name.startswith(_BACKWARD):
                around = next((each for each in self.of(within) if each["filename"] == MODULE), None)
                if around is not None:
                    self.modules[number] = around

    def of(self, within: Within | None) -> list[Frame]:
        frames: list[Frame] = []
        while within is not None:
            event, within = within
            frame = self._frame(event)
            if frame is None:
                continue
            if frame["name"] == _OUTERMOST and frame["filename"].endswith(_HERE):
                # The callers of the step are the same for all.
                break
            frames.append(frame)
            if event.name.startswith(_BACKWARD) and event.extra_fields.sequence_number in self.modules:
                frames.append(self.modules[event.extra_fields.sequence_number])
        return self.lists.setdefault(tuple(map(id, frames)), frames)

    def _frame(self, event: Any) -> Frame | None:
        fields, name = event.extra_fields, str(event.name)
        site = getattr(fields, "callsite", None)
        if name.startswith("<built-in"):
            # The name has an address, and the operator below says what it did.
            return None
        if site is None:
            key = (OPERATOR, 0, name)
        elif getattr(fields, "module", None) is not None:
            path = self.parts.get(fields.module.self_ptr, "")
            key = (MODULE, 0, f"{path} ({str(fields.module.cls_name).rpartition('.')[2]})".strip())
        else:
            key = (str(site.file_name), int(site.line_number), str(site.function_name))
        return self.frames.setdefault(key, {"filename": key[0], "line": key[1], "name": key[2]})
