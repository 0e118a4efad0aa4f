"""Profile a training step: a few real ones under torch's profiler, and one recorded as a ledger."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from napkin.accounting.ledger import Ledger
from napkin.accounting.metering import meter_step
from napkin.accounting.microbenchmark import time_operators
from napkin.accounting.pricing import Price, price, roofline_seconds
from napkin.accounting.roofs import computed_flops, roofs_of
from napkin.errors import NapkinError
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.host import detect_host
from napkin.planning.run_plan import Plan
from napkin.profiling.matching import matched_rows
from napkin.profiling.nvtx_ranges import nvtx_ranges
from napkin.profiling.operator_calls import CallsOfStep, calls_of_step
from napkin.profiling.profiler_events import ProfiledStep, profiled_steps
from napkin.profiling.step_profile import ProfiledSpan, StepProfile, middle, profile_rows, sites_of_calls

STEPS = 5
WARM_UP = 3
"""The first step makes the optimizer's state, the second and third warm caches."""


def profile(
    step: Callable[[], Any],
    module: nn.Module | None = None,
    *,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    device: str | torch.device | None = None,
    ceilings: Ceilings | None = None,
    plan: Plan | None = None,
    progress: Callable[[str], None] = lambda doing: None,
    title: str = "a step",
) -> StepProfile:
    """Say where the seconds of a training step go, operator by operator, beside what was planned.

    Args:
        step: trains once; it is called `warm_up` + 4 · `steps` + 2 times, and trains as often.
        module: what it trains, whose parts name the rows. Without it, rows are named by the classes of modules.
        steps: that are profiled, each beside one that is timed without the profiler.
        warm_up: steps before anything is measured.
        device: where it computes; None is the module's device, or the CPU.
        ceilings: the machine; None is this one, which is measured once.
        plan: of the run whose step this is; without one, the recorded step is priced on this machine, each of its
            operators timed alone.
        progress: called with a description of each stage.
        title: a name for the step.

    A row has the calls of one operator from one module in one phase. On a CPU its seconds are those of the calls; on
    CUDA those of their kernels. Raises NapkinError where another profiler is running, or the device is neither.
    """
    root = nn.Module() if module is None else module
    where = _device_of(root, device)
    measured = measured_steps(step, root, where, steps=steps, warm_up=warm_up, progress=progress)
    if ceilings is None:
        progress("measuring this machine, once")
        ceilings = calibration_of_this_machine(where.type)
    expected = plan.price if plan else _priced(measured.ledger, ceilings, where, progress)
    return assembled(measured, where, ceilings, expected, plan.ledger if plan else None, title=title)


class MeasuredSteps(NamedTuple):
    """What was seen of some steps."""

    profiled: list[ProfiledStep]
    plain_seconds: list[float]
    """Of a step without the profiler beside each of them."""
    ledger: Ledger
    """Of one that was recorded."""


def measured_steps(
    step: Callable[[], Any],
    module: nn.Module,
    device: torch.device,
    *,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    progress: Callable[[str], None] = lambda doing: None,
) -> MeasuredSteps:
    """Record one step; then profile `steps` of them, each beside one without the profiler, in turns of their order.

    Machines waver by more than the profiler takes: only steps that are next to each other can be compared. `step` is
    called `warm_up` + 4 · `steps` + 2 times in all.
    """
    if steps < 1 or warm_up < 0:
        raise NapkinError(f"profile: {steps} steps after {warm_up} of warm-up: use at least 1 after at least 0")
    progress("warming up")
    for _ in range(warm_up):
        step()
    progress("recording a step")
    ledger = meter_step(module, step, device_type=device.type).ledger
    step()
    progress("profiling")
    profiled: list[ProfiledStep] = []
    plain: list[float] = []
    for number in range(steps):
        step()
        if number % 2:
            plain.append(_timed(step, device))
        with nvtx_ranges(module, device):
            # A session's first step is slower.
            profiled += profiled_steps(step, device, steps=1, warm_up=1)
        if not number % 2:
            plain.append(_timed(step, device))
    return MeasuredSteps(profiled, plain, ledger)


def assembled(
    measured: MeasuredSteps,
    device: torch.device,
    ceilings: Ceilings,
    price: Price | None = None,
    planned_ledger: Ledger | None = None,
    *,
    title: str = "a step",
) -> StepProfile:
    """The profile of steps that were measured, beside their price."""
    profiled, plain, ledger = measured
    roofs = roofs_of(ledger.rows, ceilings)
    operators = [row.operator for row in ledger.rows]
    divided = [calls_of_step(each) for each in profiled]
    matched = [matched_rows([call.operator for call in each.calls], operators) for each in divided]
    rows, outside = profile_rows(zip(divided, matched, strict=True), ledger, roofs, price)
    seconds = [(each.end - each.begin) / 1e9 for each in profiled]
    shown = seconds.index(middle(seconds))
    return StepProfile(
        rows=rows,
        outside=outside,
        seconds=sum(seconds) / len(seconds),
        profiled_seconds=tuple(seconds),
        plain_seconds=tuple(plain),
        ledger=ledger,
        row_moments=_moments(divided[shown], matched[shown], profiled[shown].begin, len(operators)),
        trace=tuple(_spans(profiled[shown], divided[shown], matched[shown], ledger)),
        trace_seconds=seconds[shown],
        device_name=_name_of(device),
        device_type=device.type,
        roofs=roofs,
        price=price,
        planned_ledger=planned_ledger,
        title=title,
    )


def _device_of(module: nn.Module, device: str | torch.device | None) -> torch.device:
    first = next(module.parameters(), None)
    found = torch.device(device) if device is not None else torch.device("cpu") if first is None else first.device
    if found.type not in ("cpu", "cuda"):
        raise NapkinError(f"profile: the step is on {found}: only a CPU or a CUDA device can be profiled")
    return found


def _timed(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _priced(ledger: Ledger, ceilings: Ceilings, device: torch.device, progress: Callable[[str], None]) -> Price | None:
    progress("timing the operators")
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else psutil.virtual_memory().available
    try:
        timed = time_operators(
            ledger, lambda row: roofline_seconds(row, ceilings), device_type=device.type, max_bytes=free // 4
        )
        return price(ledger, ceilings, timed)
    except NapkinError:
        # Products in a format that the machine was not measured in, such as fp64.
        return None


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else detect_host().cpu_name


def _moments(step: CallsOfStep, rows: list[int | None], begin: int, count: int) -> tuple[float | None, ...]:
    moments: list[float | None] = [None] * count
    for call, number in zip(step.calls, rows, strict=True):
        if number is not None:
            moments[number] = (call.end - begin) / 1e9
    return tuple(moments)


def _spans(profiled: ProfiledStep, step: CallsOfStep, rows: list[int | None], ledger: Ledger) -> Iterable[ProfiledSpan]:
    sites = sites_of_calls(step, rows, ledger)
    for call, site, number in zip(step.calls, sites, rows, strict=True):
        row = None if number is None else ledger.rows[number]
        flops, touched = (0.0, 0) if row is None else (computed_flops(row), row.bytes_read + row.bytes_written)
        yield ProfiledSpan(*site, call.begin - profiled.begin, call.end - profiled.begin, flops, touched)
    for kernel, number in step.kernels:
        site = ("", "", "") if number is None else sites[number]
        begin, end = kernel.begin - profiled.begin, kernel.end - profiled.begin
        yield ProfiledSpan(*site, begin, end, kernel=kernel.name, stream=kernel.stream)
