"""Meter a real training step: the allocator's own events, the clock, and the operators that ran.

`meter` does the same for a training loop of one's own: it times its steps, and records one of them operator by
operator.
"""

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from napkin.accounting.ledger import METERED_STEP, Category, Ledger
from napkin.accounting.memory import Memory, allocator_events
from napkin.accounting.pricing import Price
from napkin.accounting.quantities import Line, QuantityRow, QuantityTable, Summary, with_calls
from napkin.accounting.recording import recording
from napkin.accounting.rules import adamw_bytes_rule, training_flops_rule
from napkin.errors import NapkinError
from napkin.optim.saved_state import local
from napkin.tensors import storage_bytes
from napkin.units import format_bytes, format_count, format_flops, format_rate, format_seconds


@dataclass(frozen=True, repr=False)
class StepMeasurement(Summary):
    """The operators, bytes and seconds of one real step."""

    ledger: Ledger
    """The operators that ran, on real tensors."""
    peak_bytes: int
    """Largest number of bytes in tensors at one time, by the allocator's events."""
    reserved_bytes: int | None = None
    """On CUDA, the most that the caching allocator has held; None on a CPU."""
    residents: dict[int, Category] = field(default_factory=dict[int, Category], compare=False)
    """Storages from before the step that it used and left alive, by address, with what they hold."""

    def summary(self) -> Iterator[Line]:
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
    recorded: list[tuple[Ledger, Memory]] = []

    def keep_ledger(ledger: Ledger, memory: Memory) -> None:
        recorded.append((ledger, memory))

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        with recording(module, keep_ledger):
            yield
        torch.cuda.synchronize(device)
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        ledger, memory = recorded[0]
        keep(StepMeasurement(ledger, allocated - ledger.watch_bytes, reserved, memory.residents()))
        return
    named_bytes = None if resident is None else storage_bytes(map(local, resident))
    with allocator_events() as growth, recording(module, keep_ledger):
        yield
    ledger, memory = recorded[0]
    grown = growth[0] - ledger.watch_bytes if growth else 0
    # The profiler cannot tell when memory from before the step was freed; the ledger can.
    peak = max(memory.lasting_bytes() + grown, ledger.peak_bytes) if named_bytes is None else named_bytes + grown
    keep(StepMeasurement(ledger, peak, residents=memory.residents()))


class Stopwatch:
    """Sums the seconds of named parts of a run; parts do not nest.

    On CUDA a part lies between two events on the device's stream, and has the time in which the device works on it or
    waits for the host. Nothing waits for the device while parts are timed; `seconds` does.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self._seconds: dict[str, float] = {}
        self._on_device = device_type == "cuda"
        self._unread: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part, read once the device has finished all of them."""
        if self._unread:
            self._unread[-1][2].synchronize()
        self._read_passed()
        return dict(self._seconds)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to the part of that name."""
        if self._on_device:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._unread.append((part, begin, end))
                self._read_passed()
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(part, time.perf_counter() - start)

    def _read_passed(self) -> None:
        while self._unread and self._unread[0][2].query():
            part, begin, end = self._unread.popleft()
            self._add(part, begin.elapsed_time(end) / 1000)

    def _add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds


#     with napkin.meter(model) as measured:
#         for inputs, targets in batches:
#             with measured.step(tokens=inputs.numel()):
#                 loss = cross_entropy(model(inputs), targets)
#                 loss.backward()
#                 optimizer.step()
#                 optimizer.zero_grad()
#     print(measured)
#
# The third step is recorded, which takes a multiple of its time; all others are timed and otherwise left alone. What
# the loop computes is the same, bit for bit.


@contextmanager
def meter(module: nn.Module) -> Iterator["MeteredLoop"]:
    """Meter the training loop in the block; each of its steps goes into a `with measured.step():`.

    Args:
        module: what is trained, on a CPU or a CUDA device. Several modules can be given as one `nn.ModuleList`.

    The block may use autocast, gradient accumulation and any number of optimizers. On CUDA each step ends with a wait
    for the device, and the metered step resets `torch.cuda.max_memory_allocated`.

    Raises NapkinError for a module on another device.
    """
    measured = MeteredLoop(module)
    try:
        yield measured
    finally:
        measured.end()


class MeteredLoop(Summary):
    """The figures that `meter` has measured so far. A figure for which there were too few steps is None."""

    def __init__(self, module: nn.Module) -> None:
        first = next(module.parameters(), None)
        self._module = module
        self._device = torch.device("cpu") if first is None else first.device
        if self._device.type not in ("cpu", "cuda"):
            raise NapkinError(f"meter: the module is on {self._device}: only a CPU or a CUDA device can be metered")
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        """Number of parameters; shared ones count once."""
        self.steps = 0
        """Steps that ended without an error, the metered one among them."""
        self.tokens = 0
        """Tokens of those steps, as given to `step`."""
        self.step_seconds: list[float] = []
        """Seconds of each of those steps, the metered one left out."""
        self.measurement: StepMeasurement | None = None
        """Measurement of the metered step."""
        self._metered_seconds = 0.0
        self._in_step = False
        self._begin = time.perf_counter()
        self._end: float | None = None

    @contextmanager
    def step(self, *, tokens: int = 0) -> Iterator[None]:
        """Measure the block as one training step: with gradient accumulation, all micro-batches up to the update.

        A step that raises is not counted. `tokens` is the number of tokens that it trains on, for tokens per second.

        Raises NapkinError inside another step, and after the end of the metered loop.
        """
        if self._end is not None:
            raise NapkinError("meter: the loop has ended: put the step inside of `with napkin.meter(...)`")
        if self._in_step:
            raise NapkinError("meter: a step inside a step: put all micro-batches of an update into one step")
        self._in_step = True
        self._synchronize()
        begin = time.perf_counter()
        try:
            if self.steps >= METERED_STEP and self.measurement is None:
                with metering(self._module, self._keep, device=self._device):
                    yield
                self._metered_seconds = time.perf_counter() - begin
            else:
                yield
                self._synchronize()
                self.step_seconds.append(time.perf_counter() - begin)
        finally:
            self._in_step = False
        self.steps += 1
        self.tokens += tokens

    def end(self) -> None:
        """The loop is over; `meter` calls this at the end of its block."""
        self._end = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of the loop so far, or until its end."""
        return (time.perf_counter() if self._end is None else self._end) - self._begin

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the steps, the metered one left out."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean over the steps; None where `step` was given no tokens."""
        return self.tokens / self.steps if self.tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per step over seconds per step."""
        tokens, seconds = self.tokens_per_step, self.seconds_per_step
        return tokens / seconds if tokens and seconds else None

    @property
    def ledger(self) -> Ledger | None:
        """The operators of the metered step."""
        return None if self.measurement is None else self.measurement.ledger

    @property
    def flops(self) -> int | None:
        """FLOPs of the metered step, recomputation left out."""
        return None if self.measurement is None else self.measurement.ledger.flops

    @property
    def peak_bytes(self) -> int | None:
        """Largest number of bytes in tensors during the metered step."""
        return None if self.measurement is None else self.measurement.peak_bytes

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the loop by part: its steps, the metered step, and all that is between steps, such as data."""
        parts = {"steps": sum(self.step_seconds), "metered step": self._metered_seconds}
        return {**parts, "between steps": self.seconds - sum(parts.values())}

    def summary(self) -> Iterator[Line]:
        parts = "; ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.parts.items())
        yield "MeteredLoop", f"{self.steps:,} steps of {self.parameters:,} parameters in {format_seconds(self.seconds)}"
        yield "seconds", parts
        if self.seconds_per_step is not None:
            yield "seconds per step", format_seconds(self.seconds_per_step)
        if self.tokens_per_second is not None:
            yield "tokens per second", format_count(self.tokens_per_second)
        if self.measurement is None:
            yield "too few steps", f"FLOPs and peak bytes are metered in step {METERED_STEP + 1}"
            return
        rate = self.measurement.ledger.flops / self.seconds_per_step if self.seconds_per_step else None
        flops = format_flops(self.measurement.ledger.flops)
        yield "FLOPs per step", flops if rate is None else f"{flops}, {format_rate(rate)}"
        if self.measurement.ledger.elementwise_flops:
            yield "elementwise", f"{format_flops(self.measurement.ledger.elementwise_flops)}, one per element"
        yield "peak bytes", format_bytes(self.measurement.peak_bytes)

    def _keep(self, measurement: StepMeasurement) -> None:
        self.measurement = measurement

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class PlannedStep(Protocol):
    """The interface that `reconcile` asks of a plan: `napkin.Plan` has it."""

    def table(self) -> Sequence[QuantityRow]:
        """Rule and count of every quantity."""
        ...

    def mfu_of(self, seconds: float) -> float:
        """Model-FLOPs utilisation of a step that takes so long."""
        ...


def reconcile(expected: Ledger | PlannedStep, measured: MeteredLoop, price: Price | None = None) -> QuantityTable:
    """Rule, count and meter of a loop of one's own, side by side.

    Args:
        expected: of one step of the loop, from `count`; or the plan of a run.
        measured: from `meter`.
        price: for a ledger, what a step of it was predicted to take.
    """
    meters = {
        "parameters": measured.parameters,
        "FLOPs per step": measured.flops,
        "peak bytes": measured.peak_bytes,
        "seconds per step": measured.seconds_per_step,
    }
    if isinstance(expected, Ledger):
        rows = _rows_of_ledger(expected, measured.tokens_per_step, price)
    else:
        rows = expected.table()
        if measured.seconds_per_step is not None:
            # Over all steps together, as everywhere else: median seconds would leave out the slow ones.
            meters["MFU"] = expected.mfu_of(sum(measured.step_seconds) / len(measured.step_seconds))
    return QuantityTable(dataclasses.replace(row, meter=meters.get(row.quantity)) for row in rows)


def _rows_of_ledger(ledger: Ledger, tokens: float | None, price: Price | None) -> list[QuantityRow]:
    flops_rule = None if tokens is None else training_flops_rule(ledger.parameters, tokens)
    flops_note = "rule 6·N·T leaves attention out" if tokens is not None else "rule 6·N·T: give `step` its tokens"
    if ledger.elementwise_flops:
        flops_note += f"; elementwise work is apart: {format_flops(ledger.elementwise_flops)}"
    if ledger.unknown_operators:
        flops_note += f"; not counted: {with_calls(ledger.unknown_operators)}: register_operator"
    bytes_note = "rule 16 bytes per parameter: AdamW in fp32, no activations, no batch"
    seconds = None if price is None else price.seconds
    seconds_note = "" if price is None else f"count: within a factor of {price.factor:.2f} in nine cases of ten"
    return [
        QuantityRow("parameters", "count", None, ledger.parameters),
        QuantityRow("FLOPs per step", "FLOP", flops_rule, ledger.flops, note=flops_note),
        QuantityRow("peak bytes", "bytes", adamw_bytes_rule(ledger.parameters), ledger.peak_bytes, note=bytes_note),
        QuantityRow("seconds per step", "seconds", None, seconds, note=seconds_note),
    ]
