"""Tracks which storages are alive while a step runs, and replays their births and deaths to find the peak.

Memory is tracked by storage, not by tensor: views share a storage and count once, and a storage is alive until its
last reference is gone, wherever that is (a variable, the autograd graph, autocast's cache). A storage keeps its Python
object for as long as it lives, so a weak reference to it reports the exact moment at which it is freed.

`allocator_events` is the CPU allocator's own account of a block of code, as torch's profiler records it.
"""

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, no_type_check
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage, nn

from napkin.accounting.cuda.caching_allocator import Replay, replay
from napkin.accounting.ledger import STATE, Category, Moment

Event = tuple[int, int, int]
"""(row, storage, bytes gained or lost)."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that were in use at one time."""

    bytes: int
    by_category: dict[Category, int]
    timeline: tuple[Moment, ...]
    """For each row that allocated or freed memory, its moment of most bytes."""


@dataclass(slots=True)
class _Storage:
    bytes: int
    category: Category
    row: int | None
    """The row that allocated it; None if it is older than the step."""
    kept: bool = False
    of_parameters: bool = False
    """True if its contents are parameters, or derived from parameters alone."""


# Runs for every operator of a step: the type checks that are on during tests would take half of their time.
@no_type_check
class Memory:
    """The storages of a step, by number, and the events in which they are allocated and freed.

    With `from_birth`, events from before the step are kept too: they decide what a caching allocator has in its cache.
    """

    def __init__(self, *, from_birth: bool = False) -> None:
        self.storages: list[_Storage] = []
        self.alive: dict[int, int] = {}  # address of the storage -> its number
        self.references: dict[int, weakref.ref] = {}
        self.from_birth = from_birth
        self.earlier: list[Event] = []
        self.bystanders: set[int] = set()
        """Storages from before the step that it has not used yet."""
        self._start_over()
        self.recording = False

    def begin(self) -> None:
        """Begin the step with what is alive now."""
        self.earlier = self._unwatched()
        self._start_over()

    def end(self) -> None:
        """The step is over. What follows changes no figure of it, and can be part of `highest` and `replayed`."""
        self.recording = False

    def _start_over(self) -> None:
        self.recording = True
        self.row = 0
        """The row of the ledger that is running or ran last."""
        self.sums_gradients = False
        """True if autograd would do the work of this row in place if nothing were recorded."""
        self.events: list[Event] = []
        self.reusing: list[tuple[int, int]] = []  # (first, last): if nothing were recorded, the last would come first
        self.allocated: Counter[int] = Counter()  # bytes by row
        for number in self.alive.values():
            self.storages[number].row = None
        self.start_alive = set(self.alive.values())

    def claim(
        self, tensors: Iterable[Tensor], category: Category, *, made: bool = False, on_host: bool = False
    ) -> None:
        """Track the storages of `tensors` that are not tracked yet: allocated by this row, or older than the step.

        Storages `on_host` take no memory of the device that is tracked.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address in self.alive:
                if self.bystanders:
                    self.bystanders.discard(self.alive[address])
                continue
            self._track(storage, 0 if on_host else storage.nbytes(), category, made=made)

    def resize(self, storage: UntypedStorage) -> None:
        """A tracked storage has been resized: one is freed, another allocated. FSDP2 so keeps tensors without memory.

        What grows from nothing holds parameters, gathered from other ranks.
        """
        address = storage._cdata
        number = self.alive.get(address)
        if number is None or self.storages[number].bytes == storage.nbytes():
            return
        was = self.storages[number]
        self.bystanders.discard(number)
        self._freed(address, number)
        self._track(storage, storage.nbytes(), was.category if was.bytes else "weight copies", made=True)

    def claim_bystanders(self, tensors: Iterable[Tensor]) -> None:
        """Track storages that are older than the step, which may use them, free them, or do neither."""
        before = set(self.alive.values())
        self.claim(tensors, "inputs")
        self.bystanders = set(self.alive.values()) - before

    def release_bystanders(self) -> None:
        """At the end of the step, drop bystanders: storages that it neither used nor freed."""
        for number in self.bystanders & set(self.alive.values()):
            self.storages[number].bytes = 0
        self.bystanders = set()

    def take_and_give_back(self, *sizes: int) -> None:
        """Scratch of this row: blocks that its operator allocates one after the other, and then frees all together."""
        taken = [(self._new(size, "temporaries", made=True), size) for size in sizes if size]
        self.events += [(self.row, number, -size) for number, size in taken]

    def take(self, size: int) -> None:
        """Memory that belongs to no tensor and is never freed."""
        number = self._new(size, "temporaries", made=True)
        self.alive[-1 - number] = number

    def holds(self, tensor: Tensor, category: Category) -> bool:
        """True if the storage of `tensor` is tracked under that category."""
        number = self.alive.get(tensor.untyped_storage()._cdata)
        return number is not None and self.storages[number].category == category

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, if it is tracked."""
        return self.alive.get(tensor.untyped_storage()._cdata)

    def stems_from_parameters(self, tensor: Tensor) -> bool:
        """True if a tensor holds parameters or buffers, or values derived from them alone: casts, sums, quantized
        copies."""
        number = self.number_of(tensor)
        return number is not None and self.storages[number].of_parameters

    def trace_parameters(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Mark results computed from parameters and constants alone as stemming from parameters."""
        stems = [self.stems_from_parameters(tensor) for tensor in inputs]
        if any(stems) and all(tensor.dim() == 0 or known for tensor, known in zip(inputs, stems, strict=True)):
            for tensor in outputs:
                number = self.number_of(tensor)
                if number is not None:
                    self.storages[number].of_parameters = True

    def reclaim(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Put storages that are tracked already into another category."""
        for tensor in tensors:
            number = self.alive.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.storages[number].category = category

    def keep(self, rows: set[int]) -> None:
        """Mark what `rows` allocated and is still alive as kept for the backward pass."""
        for number in self.alive.values():
            storage = self.storages[number]
            if storage.row in rows and storage.category in ("temporaries", "weight copies"):
                storage.kept = True
                if storage.category == "temporaries":
                    storage.category = "activations"

    def kept(self) -> Counter[int]:
        """Bytes kept for the backward pass, by row."""
        sums: Counter[int] = Counter()
        for storage in self.storages:
            if storage.kept and storage.row is not None:
                sums[storage.row] += storage.bytes
        return sums

    def sizes(self) -> list[int]:
        return [storage.bytes for storage in self.storages]

    def replayed(self) -> Replay:
        """All events, from the first storage on, as CUDA's caching allocator serves them."""
        events = (*self.earlier, *self._unwatched())
        return replay(((number, change) for _, number, change in events), len(self.storages))

    def n_events(self) -> int:
        """Events so far, those from before the step among them."""
        return len(self.earlier) + len(self.events)

    def highest(self, sizes: list[int]) -> tuple[int, int]:
        """The most bytes in use since the first storage, and after how many events."""
        alive = most = at = 0
        for event, (_, number, change) in enumerate((*self.earlier, *self._unwatched()), start=1):
            alive += sizes[number] if change >= 0 else -sizes[number]
            if alive > most:
                most, at = alive, event
        return most, at

    def growth(self, begin: int, end: int) -> int:
        """The most bytes by which memory grew between two events, of all since the first storage."""
        events = (*self.earlier, *self._unwatched())
        return max(accumulate(change for _, _, change in events[begin:end]), default=0)

    def bytes_alive(self) -> int:
        """Bytes that are in use now."""
        return sum(self.storages[number].bytes for number in self.alive.values())

    def start_bytes(self, sizes: list[int]) -> int:
        """Bytes in use before the step; `sizes` are those of the storages."""
        return sum(sizes[number] for number in self.start_alive)

    def lasting_bytes(self) -> int:
        """Bytes that were alive before the step and still are."""
        return sum(self.storages[number].bytes for number in self.start_alive & set(self.alive.values()))

    def residents(self) -> dict[int, Category]:
        """Storages that were alive before the step and still are, by address; bystanders of no bytes left out."""
        lasting = {number: address for address, number in self.alive.items() if number in self.start_alive}
        return {a: self.storages[number].category for number, a in lasting.items() if self.storages[number].bytes}

    def peak(self, sizes: list[int], *, watched: bool) -> Peak:
        """Replay the events once to find the peak, and once more up to the peak to see what was alive there."""
        events = self.events if watched else self._unwatched()
        bytes_alive = peak = self.start_bytes(sizes)
        held = Counter[Category]()
        for number in self.start_alive:
            held[self.storages[number].category] += sizes[number]
        peak_event = 0
        timeline: dict[int, Moment] = {}
        for event, (row, number, change) in enumerate(events, start=1):
            size = sizes[number] if change >= 0 else -sizes[number]
            bytes_alive += size
            held[self.storages[number].category] += size
            if row not in timeline or bytes_alive > timeline[row].bytes_alive:
                state_bytes = sum(held[category] for category in STATE)
                timeline[row] = Moment(
                    row, bytes_alive, state_bytes, held["weight copies"], held["gradients"], held["activations"]
                )
            if bytes_alive > peak:
                peak, peak_event = bytes_alive, event
        alive = set(self.start_alive)
        for _, number, change in events[:peak_event]:
            (alive.add if change >= 0 else alive.discard)(number)
        by_category: Counter[Category] = Counter()
        for number in alive:
            by_category[self.storages[number].category] += sizes[number]
        return Peak(peak, dict(by_category), tuple(timeline.values()))

    def _unwatched(self) -> list[Event]:
        events = list(self.events)
        for first, last in self.reusing:
            events[first : last + 1] = [events[last], *events[first:last]]
        return events

    def _new(self, size: int, category: Category, *, made: bool) -> int:
        number = len(self.storages)
        of_parameters = category in ("parameters", "weight copies")
        self.storages.append(_Storage(size, category, self.row if made else None, of_parameters=of_parameters))
        if not self.recording:
            if self.from_birth:
                self.events.append((self.row, number, size))
        elif made:
            self.allocated[self.row] += size
            self.events.append((self.row, number, size))
        else:
            self.start_alive.add(number)
            self.earlier.append((self.row, number, size))
        return number

    def _track(self, storage: UntypedStorage, size: int, category: Category, *, made: bool) -> None:
        address, number = storage._cdata, self._new(size, category, made=made)
        self.alive[address] = number
        self.references[number] = weakref.ref(storage, lambda _: self._freed(address, number))

    def _freed(self, address: int, number: int) -> None:
        del self.alive[address], self.references[number]
        if not (self.recording or self.from_birth):
            return
        size = self.storages[number].bytes
        # Autograd sums two gradients in place if nothing else refers to the first one, and writes into zeros that it
        # has made. While a dispatch mode is active, as it is here, it makes another tensor and then frees the first.
        if self.sums_gradients:
            self._reuse(number, size)
        self.events.append((self.row, number, -size))

    def _reuse(self, freed: int, size: int) -> None:
        # The scratch of the call may lie between. One tensor is written to, though several may be freed.
        if self.reusing and self.events[self.reusing[-1][0]][0] == self.row:
            return
        for event in range(len(self.events) - 1, -1, -1):
            row, number, change = self.events[event]
            # A storage younger than the tensor that takes its place cannot have been written to.
            if row != self.row or number == freed:
                return
            if change == size and number in self.alive.values():
                self.reusing.append((event, len(self.events)))
                return


@contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Hand each storage to `tell` that is resized in the block: FSDP2 so frees parameters that tensors refer to."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        tell(storage)

    with patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


def tensors_alive(devices: set[torch.device]) -> Iterator[Tensor]:
    """All tensors on these devices that Python has an object for, and their gradients."""
    for value in gc.get_objects():
        # The exact type: a proxy may claim to be a tensor, and a fake tensor has no memory.
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.device in devices:
            yield value
            if value.is_leaf and value.grad is not None and value.grad.layout is torch.strided:
                yield value.grad


@contextmanager
def allocator_events() -> Iterator[list[int]]:
    """The most that the CPU's allocator grew by in the block, as the only item, once it has ended.

    No item where a profiler is running already: there can be one at a time, and a second would end the first.
    """
    growth: list[int] = []
    with allocator_profile() as profiler:
        yield growth
    if profiler is not None:
        growth.append(_peak_of_events(profiler))


@contextmanager
def allocator_profile(*, with_stack: bool = False) -> Iterator[Any]:
    """Profile what the CPU's allocator does in the block; yields torch's profiler, or None where one runs already.

    With stacks, Python's functions and the modules are events too.
    """
    if torch._C._autograd._profiler_enabled():  # pyright: ignore[reportAttributeAccessIssue]
        yield None
        return
    # The profiler's own log lines do not belong in a user's terminal; the variable is read at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.autograd.profiler import profile

    block = [torch.empty(1)]
    # torch.profiler's own would also make a tree of operators of the events: most of the time that this takes.
    with profile(use_device=None, profile_memory=True, with_stack=with_stack) as profiler:
        # torch warns of the first free, and of each thousandth, of memory from before the profile.
        with _stderr_discarded():
            block.clear()
        yield profiler


@contextmanager
def _stderr_discarded() -> Iterator[None]:
    """Discard what C++ writes to the terminal in the block."""
    try:
        terminal = os.dup(2)
    except OSError:  # the process has none
        yield
        return
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def _peak_of_events(profiler: Any) -> int:
    """Largest sum of the block's own allocations; releases of memory from before it are left out."""
    return max(accumulate(change.bytes for change in own_changes(profiler)), default=0)


class Within(NamedTuple):
    """An event of the profiler, and those around it."""

    event: Any
    outer: "Within | None"


class AllocatorChange(NamedTuple):
    """An allocation of the CPU's allocator, or a release."""

    time: int
    """Nanoseconds."""
    thread: int
    bytes: int
    """Below zero for a release."""
    pointer: int
    within: Within | None
    """The profiler's events around it."""


def profiler_events(profiler: Any) -> Iterator[Within]:
    """All events of a profiler, each with those around it."""
    pending = [Within(event, None) for event in profiler.kineto_results.experimental_event_tree()]
    while pending:
        each = pending.pop()
        yield each
        pending.extend(Within(child, each) for child in each.event.children)


def own_changes(profiler: Any) -> list[AllocatorChange]:
    """What the profiled thread allocated and released, in order; releases of memory from before are left out.

    The profiler knows the size of such memory only if it was running when the memory was allocated. What
    gloo copies to send it to other ranks is left out: its threads free that at some later time.
    """
    changes: list[AllocatorChange] = []
    sent: set[int] = set()
    for event, within in profiler_events(profiler):
        if event.name == "[memory]":
            field = event.extra_fields
            changes.append(AllocatorChange(event.start_time_ns, event.start_tid, field.alloc_size, field.ptr, within))
            if _sends(within):
                sent.add(event.start_time_ns)
    # The first event is the block's own: see `allocator_events`.
    own = min(changes, key=lambda change: change.time).thread if changes else 0
    pointers: set[int] = set()
    kept: list[AllocatorChange] = []
    for change in sorted(changes, key=lambda change: change.time):
        if change.bytes > 0:
            if change.thread != own or change.time in sent:
                continue
            pointers.add(change.pointer)
        elif change.pointer in pointers:
            pointers.remove(change.pointer)
        else:
            continue
        kept.append(change)
    return kept


def _sends(within: Within | None) -> bool:
    while within is not None:
        event, within = within
        if event.name.startswith("c10d::"):
            return True
    return False
