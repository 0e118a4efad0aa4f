"""Meter a real training step: the allocator's own events, the clock, and the operators that really ran."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from napkin.accounting.ledger import Ledger
from napkin.accounting.record import record
from napkin.optim.sharded_tensors import local
from napkin.tensors import storage_bytes


@dataclass(frozen=True)
class StepMeasurement:
    """What one real step did."""

    ledger: Ledger
    """The operators that ran, on real tensors."""
    peak_bytes: int
    """Largest number of bytes in tensors at one time, by the allocator's events."""
    reserved_bytes: int | None = None
    """On CUDA, the most that the caching allocator has held; None on a CPU."""


def meter_step(
    module: nn.Module,
    step: Callable[[], Any],
    *,
    device_type: str = "cpu",
    resident: Iterable[Tensor] | None = None,
) -> StepMeasurement:
    """Run `step`, which trains `module` once, under watch, and return what it did. The step's results are unchanged.

    On CUDA the peak is the caching allocator's own maximum of allocated bytes. On a CPU it is the sum of the
    allocator's events, as the profiler records them, over what was alive before the step: the tensors that the step
    finds, or those named as `resident`, where storages change their size meanwhile as FSDP2's do. What the watch itself
    added to the peak is taken off.
    """
    if device_type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        ledger = record(module, step)
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return StepMeasurement(ledger, allocated - ledger.watch_bytes, reserved)
    # The profiler's own log lines have no place in a user's terminal; the variable is read at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    named_bytes = None if resident is None else storage_bytes(map(local, resident))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        ledger = record(module, step)
    resident_bytes = ledger.resident_bytes if named_bytes is None else named_bytes
    return StepMeasurement(ledger, resident_bytes + _peak_of_events(profiler) - ledger.watch_bytes)


def _peak_of_events(profiler: Any) -> int:
    """Largest sum of the allocations and releases so far."""
    changes: list[tuple[int, int]] = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    alive = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        alive += change
        peak = max(peak, alive)
    return peak


class Stopwatch:
    """Sums the seconds of named parts of a run; parts do not nest.

    On CUDA a part's kernels are waited for, so that their time falls to the part that launched them.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.seconds: dict[str, float] = {}
        self._synchronize = torch.cuda.synchronize if device_type == "cuda" else None

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time what happens in the block, as a part of that name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._synchronize is not None:
                self._synchronize()
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
