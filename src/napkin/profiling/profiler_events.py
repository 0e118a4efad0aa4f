"""What torch's profiler has recorded of some steps: events of the host's threads, and kernels of a device."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    """By which kernels name the event that launched them."""


class Kernel(NamedTuple):
    """What ran on the device: a kernel, a copy or a fill."""

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
            # Calls of CUDA's runtime are linked to the event that makes them, and are a part of it.
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
