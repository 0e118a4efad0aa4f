"""Divides the time of a step among the operators that were called in it.

Each moment of a thread belongs to the innermost event that runs. An operator that computes, with all that it calls, is
one call: the same that the ledger has a row for. torch's work around it, from an operator that only calls others to
autograd's engine, is overhead of the call and counts with it. Everything else is Python.

On a device the time is that of its kernels, each of which belongs to the call that launched it; where several run at a
time, the later ones count from the end of the earlier.

Events are those of the host's threads and the kernels of a device, as torch's profiler recorded them. Each call is
matched with its row of the ledger: both are the same operators in the same order.
"""

import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

from napkin.errors import NapkinError

STEP = "napkin step"
"""The range of each profiled step."""


class HostEvent(NamedTuple):
    """A call on a thread of the host; moments are in nanoseconds of the profiler's clock."""

    name: str
    overload: str
    begin: int
    end: int
    thread: int
    number: int
    """The number by which kernels name the event that launched them."""


class Kernel(NamedTuple):
    """A kernel, a copy or a fill that ran on the device."""

    name: str
    begin: int
    end: int
    stream: int
    launched_by: int
    """Number of the innermost host event around its launch; 0 if it is not known."""


class ProfiledStep(NamedTuple):
    """The events of one step, in the order in which they begin, outer ones first."""

    begin: int
    end: int
    host: tuple[HostEvent, ...]
    kernels: tuple[Kernel, ...]


def profiled_steps(step: Callable[[], Any], device: torch.device, *, steps: int, warm_up: int) -> list[ProfiledStep]:
    """Run `step` under torch's profiler, `warm_up` times unheeded and then `steps` times; the events of the latter.

    On CUDA each step ends when its kernels have. Raises NapkinError where a profiler is running already.
    """
    with _profiling(device) as profiler:
        for number in range(-warm_up, steps):
            with torch.profiler.record_function(f"{STEP} {number}"):
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    return list(_steps_of(profiler.profiler.kineto_results.events(), steps))


@contextmanager
def _profiling(device: torch.device) -> Iterator[Any]:
    if torch._C._autograd._profiler_enabled():  # pyright: ignore[reportAttributeAccessIssue]
        raise NapkinError("profile: a profiler is running already, and there can be one at a time: end it first")
    # The profiler's own log lines do not belong in a user's terminal; the variable is read at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    # With overloads, an operator that only calls others can be told from one that computes.
    profiler_module = torch._C._profiler  # pyright: ignore[reportAttributeAccessIssue]
    config = profiler_module._ExperimentalConfig(capture_overload_names=True)
    with profile(activities=activities, experimental_config=config, acc_events=True) as profiler:
        yield profiler


def _steps_of(events: Sequence[Any], steps: int) -> Iterator[ProfiledStep]:
    host: list[HostEvent] = []
    kernels: list[Kernel] = []
    for event in events:
        linked = event.linked_correlation_id()
        begin, end = event.start_ns(), event.start_ns() + event.duration_ns()
        if event.device_type() != DeviceType.CPU:
            # The device's copy of a range of the host is no work of the device.
            if not event.is_user_annotation():
                kernels.append(Kernel(event.name(), begin, end, event.device_resource_id(), linked))
        elif not linked:
            # Calls of CUDA's runtime are linked to the event that makes them, and count with it.
            host.append(
                HostEvent(
                    event.name(), event.overload_name(), begin, end, event.start_thread_id(), event.correlation_id()
                )
            )
    host.sort(key=lambda event: (event.begin, -event.end))
    kernels.sort(key=lambda kernel: (kernel.begin, -kernel.end))
    ranges = {event.name: event for event in host if event.name.startswith(STEP)}
    for number in range(steps):
        step = ranges[f"{STEP} {number}"]
        yield ProfiledStep(
            step.begin,
            step.end,
            tuple(event for event in host if step.begin <= event.begin < step.end and not event.name.startswith(STEP)),
            tuple(kernel for kernel in kernels if step.begin <= kernel.begin < step.end),
        )


Kind = Literal["call", "torch", "compiled", "Python"]

COMPILED = "compiled code"
"""The operator that code of torch's compiler is shown as, without the operators that it calls."""
WAITING = "device waits"
UNKNOWN_KERNELS = "kernels of no operator"
PYTHON = "Python between calls"
ENGINE = "torch between calls"

_OPERATOR = re.compile(r"(\w+)::(\w+)")
_TORCH = re.compile(r"autograd::engine::|torch::autograd::|\w+Backward\d+$")
_COMPILED = re.compile(r"## Call CompiledFxGraph")


class OperatorCall(NamedTuple):
    """One call of an operator."""

    operator: str
    begin: int
    end: int
    nanoseconds: int
    """The call's nanoseconds of the step: on a CPU with what torch took to make the call, on a device of its
    kernels."""
    counts: bool = True
    """False for the later parts of compiled code, which calls operators in between."""


class Gap(NamedTuple):
    """Time in no call."""

    name: str
    nanoseconds: int
    before: int
    """Number of the call that comes next, or of the last one."""


class CallsOfStep(NamedTuple):
    """The calls of a step in their order. Their nanoseconds and those of the gaps add up to the step's."""

    calls: tuple[OperatorCall, ...]
    gaps: tuple[Gap, ...]
    kernels: tuple[tuple[Kernel, int | None], ...] = ()
    """Each with the number of its call."""


def calls_of_step(step: ProfiledStep) -> CallsOfStep:
    """Divide a step's time among its calls; by its kernels where there are any."""
    calls, gaps = _on_host(step)
    return _on_device(step, calls) if step.kernels else CallsOfStep(calls, gaps)


@cache
def kind_of(name: str, overload: str = "") -> Kind:
    """The kind of an event of the host.

    >>> kind_of("aten::mm"), kind_of("aten::linear"), kind_of("MmBackward0"), kind_of("MyFunction")
    ('call', 'torch', 'torch', 'Python')
    """
    if _OPERATOR.fullmatch(name):
        operator = f"{name}.{overload}" if overload else name
        try:
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            composite = has(operator, "CompositeImplicitAutograd") and not (
                has(operator, "CPU") or has(operator, "CUDA")
            )
        except RuntimeError:
            # A range of the user's with a name like this.
            return "Python"
        return "torch" if composite else "call"
    if _TORCH.match(name):
        return "torch"
    return "compiled" if _COMPILED.match(name) else "Python"


def _kind(event: HostEvent | None) -> Kind:
    return "Python" if event is None else kind_of(event.name, event.overload)


class _Segment(NamedTuple):
    begin: int
    end: int
    event: HostEvent | None


def _on_host(step: ProfiledStep) -> tuple[tuple[OperatorCall, ...], tuple[Gap, ...]]:
    segments = list(_segments(_computing_threads(step), step.begin, step.end))
    calls: list[OperatorCall] = []
    seen: set[HostEvent] = set()
    for segment in segments:
        kind = _kind(segment.event)
        if segment.event is not None and kind in ("call", "compiled"):
            name = COMPILED if kind == "compiled" else segment.event.name.partition("::")[2]
            nanoseconds = segment.end - segment.begin
            calls.append(OperatorCall(name, segment.begin, segment.end, nanoseconds, counts=segment.event not in seen))
            seen.add(segment.event)
    begins = [call.begin for call in calls]
    extra = [0] * len(calls)
    gaps: list[Gap] = []
    for begin, end, event in segments:
        kind = _kind(event)
        following = bisect_left(begins, end)
        if kind == "torch":
            assert event is not None
            if following < len(calls) and calls[following].begin < event.end:
                extra[following] += end - begin
                continue
            if following and calls[following - 1].begin >= event.begin:
                extra[following - 1] += end - begin
                continue
        if kind in ("torch", "Python"):
            name = ENGINE if kind == "torch" else PYTHON if event is None else f"Python in {event.name}"
            gaps.append(Gap(name, end - begin, min(following, len(calls) - 1)))
    with_extra = (call._replace(nanoseconds=call.nanoseconds + more) for call, more in zip(calls, extra, strict=True))
    return tuple(with_extra), tuple(gaps)


def _computing_threads(step: ProfiledStep) -> list[HostEvent]:
    """The events of the thread that takes the step and, with a device, of autograd's."""
    if not step.host:
        return []
    main = step.host[0].thread
    threads = {main}
    if step.kernels:
        threads |= {event.thread for event in step.host if event.name.startswith("autograd::engine::")}
    return [event for event in step.host if event.thread in threads]


def _segments(events: Sequence[HostEvent], begin: int, end: int) -> Iterator[_Segment]:
    """The step's time in pieces, each with its innermost event; what a call calls is a part of it."""
    open_events: list[HostEvent] = []
    now = begin

    def until(moment: int) -> Iterator[_Segment]:
        nonlocal now
        while open_events and open_events[-1].end <= moment:
            closed = open_events.pop()
            if closed.end > now:
                yield _Segment(now, closed.end, closed)
                now = closed.end
        if moment > now:
            yield _Segment(now, moment, open_events[-1] if open_events else None)
            now = moment

    for event in events:
        innermost = open_events[-1] if open_events else None
        if innermost is not None and event.begin < innermost.end and _kind(innermost) == "call":
            continue
        yield from until(min(event.begin, end))
        open_events.append(event)
    yield from until(end)


def _on_device(step: ProfiledStep, calls: tuple[OperatorCall, ...]) -> CallsOfStep:
    launched_at = {event.number: event.begin for event in step.host}
    begins = [call.begin for call in calls]
    spent = [0] * len(calls)
    gaps: list[Gap] = []
    kernels: list[tuple[Kernel, int | None]] = []
    now, last = step.begin, 0
    for kernel in step.kernels:
        call = _launching_call(calls, begins, launched_at.get(kernel.launched_by))
        kernels.append((kernel, call))
        last = last if call is None else call
        begin, end = max(kernel.begin, now), min(kernel.end, step.end)
        if begin > now:
            gaps.append(Gap(WAITING, begin - now, last))
        if end > begin:
            if call is None:
                gaps.append(Gap(UNKNOWN_KERNELS, end - begin, last))
            else:
                spent[call] += end - begin
        now = max(now, begin, end)
    if step.end > now:
        gaps.append(Gap(WAITING, step.end - now, last))
    timed = (call._replace(nanoseconds=each) for call, each in zip(calls, spent, strict=True))
    return CallsOfStep(tuple(timed), tuple(gaps), tuple(kernels))


def _launching_call(calls: Sequence[OperatorCall], begins: Sequence[int], moment: int | None) -> int | None:
    """Number of the call that runs at a moment, or that follows next, where torch launched before it called."""
    if moment is None or not calls:
        return None
    before = bisect_right(begins, moment) - 1
    if before >= 0 and moment < calls[before].end:
        return before
    return min(before + 1, len(calls) - 1)


# They differ in little. Recording a step makes autograd add gradients out of place where it would add them in place,
# `reshape` reports its view under another name, and a few operators are seen by one of both alone.

_ALIKE = {"_reshape_alias": "view", "_unsafe_view": "view"}
_SURE = 3
"""The number of operators in a row that have to agree before the two are taken to be in step again."""
_FARTHEST = 200
"""Operators that are looked ahead."""


def matched_rows(calls: Sequence[str], rows: Sequence[str]) -> list[int | None]:
    """For each call, by operator, the number of its row; None for one that the ledger does not have.

    >>> matched_rows(["mm", "add_", "extra", "mul", "sum", "exp"], ["mm", "add", "mul", "sum", "exp"])
    [0, 1, None, 2, 3, 4]
    >>> matched_rows(["mm", "add", "mul", "sum", "exp"], ["mm", "promote_types", "add", "mul", "sum", "exp"])
    [0, 2, 3, 4, 5]
    """
    left, right = [_plain(name) for name in calls], [_plain(name) for name in rows]
    matches: list[int | None] = []
    row = 0
    while len(matches) < len(left):
        call = len(matches)
        if row < len(right) and left[call] == right[row]:
            matches.append(row)
            row += 1
            continue
        skipped_calls, skipped_rows = _back_in_step(left, right, call, row)
        matches += [None] * skipped_calls
        row += skipped_rows
    return matches


def _plain(name: str) -> str:
    """The operator without the mark of its in-place form."""
    return _ALIKE.get(name, name.rstrip("_") or name)


def _back_in_step(left: Sequence[str], right: Sequence[str], call: int, row: int) -> tuple[int, int]:
    """The numbers of calls and rows to skip, as few as possible, for what follows to agree."""
    places: dict[tuple[str, ...], int] = {}
    for place in range(row, min(row + _FARTHEST, len(right)) + 1):
        places.setdefault(tuple(right[place : place + _SURE]), place)
    best = (1, 0)
    fewest = 2 * _FARTHEST + 1
    for ahead in range(call, min(call + _FARTHEST, len(left)) + 1):
        # Near the ends, fewer neighbours are left to compare, and at the ends none.
        place = places.get(tuple(left[ahead : ahead + _SURE]))
        if place is not None and ahead - call + place - row < fewest:
            best = ahead - call, place - row
            fewest = sum(best)
    return best
