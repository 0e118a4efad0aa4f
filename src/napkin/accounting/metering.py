"""Meter a real training step: the allocator's own events, the clock, and the operators that ran."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from napkin.accounting.allocator_events import allocator_events
from napkin.accounting.ledger import Ledger
from napkin.accounting.recording import recording
from napkin.accounting.summary import Line, Summary
from napkin.optim.sharded_tensors import local
from napkin.tensors import storage_bytes
from napkin.units import format_bytes, format_flops

METERED_STEP = 2
"""The first step creates the optimizer's state and the second warms caches: the third, number 2, is like all later."""


@dataclass(frozen=True, repr=False)
class StepMeasurement(Summary):
    """What one real step did."""

    ledger: Ledger
    """The operators that ran, on real tensors."""
    peak_bytes: int
    """Largest number of bytes in tensors at one time, by the allocator's events."""
    reserved_bytes: int | None = None
    """On CUDA, the most that the caching allocator has held; None on a CPU."""

    def summary(self) -> Iterator[Line]:
        """The measurement in a few lines."""
        yield "StepMeasurement", f"{len(self.ledger.rows):,} operator calls"
        yield "FLOPs", format_flops(self.ledger.flops)
        if self.ledger.elementwise_flops:
            yield "elementwise", f"{format_flops(self.ledger.elementwise_flops)}, one per element, not in the sum"
        yield "peak bytes", format_bytes(self.peak_bytes)
        if self.reserved_bytes is not None:
            yield "reserved bytes", format_bytes(self.reserved_bytes)


def meter_step(
    module: nn.Module,
    step: Callable[[], Any],
    *,
    device_type: str = "cpu",
    resident: Iterable[Tensor] | None = None,
) -> StepMeasurement:
    """Run `step`, which trains `module` once, and return what it did. The step's results are unchanged.

    On CUDA the peak is the caching allocator's own maximum of allocated bytes. On a CPU it is the sum of the
    allocator's events, as the profiler records them, plus what was alive before the step: the tensors that the step
    finds, or those named as `resident`, where the step's operators are not seen, because they are compiled. What the
    recording itself added to the peak is subtracted.
    """
    measured: list[StepMeasurement] = []
    with metering(module, measured.append, device=torch.device(device_type), resident=resident):
        step()
    return measured[0]


@contextmanager
def metering(
    module: nn.Module,
    keep: Callable[[StepMeasurement], Any],
    *,
    device: torch.device,
    resident: Iterable[Tensor] | None = None,
) -> Iterator[None]:
    """`meter_step` with a block as the step: hands its measurement to `keep`, unless the block raises."""
    recorded: list[tuple[Ledger, int]] = []

    def keep_ledger(ledger: Ledger, lasting_bytes: int) -> None:
        recorded.append((ledger, lasting_bytes))

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        with recording(module, keep_ledger):
            yield
        torch.cuda.synchronize(device)
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        ledger = recorded[0][0]
        keep(StepMeasurement(ledger, allocated - ledger.watch_bytes, reserved))
        return
    named_bytes = None if resident is None else storage_bytes(map(local, resident))
    with allocator_events() as growth, recording(module, keep_ledger):
        yield
    ledger, lasting_bytes = recorded[0]
    grown = growth[0] - ledger.watch_bytes if growth else 0
    if named_bytes is not None:
        keep(StepMeasurement(ledger, named_bytes + grown))
    else:
        # The profiler cannot tell when memory from before the step was freed; the ledger can.
        keep(StepMeasurement(ledger, max(lasting_bytes + grown, ledger.peak_bytes)))


class Stopwatch:
    """Sums the seconds of named parts of a run; parts do not nest.

    On CUDA each part ends with a wait for its kernels, so that their time is counted where they were launched.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.seconds: dict[str, float] = {}
        self._synchronize = torch.cuda.synchronize if device_type == "cuda" else None

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to the part of that name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._synchronize is not None:
                self._synchronize()
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
