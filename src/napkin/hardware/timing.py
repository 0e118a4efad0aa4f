"""Seconds of a call on a device: by the wall clock, or by events in the queue of a GPU."""

import time
from collections.abc import Callable

import torch


def wall_seconds(call: Callable[[], object], device_type: str, calls: int = 1) -> float:
    """Seconds of one of `calls` calls in a row, until the device has done their work."""
    synchronize = torch.cuda.synchronize if device_type == "cuda" else _nothing
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return (time.perf_counter() - begin) / calls


def processor_seconds(call: Callable[[], object], calls: int = 1) -> tuple[float, float]:
    """Seconds per call of `calls` consecutive calls on the CPU: wall-clock seconds, and processor seconds of the
    busiest thread. The other threads are taken to have equal parts of the work, since only their total processor time
    is known.
    """
    others = max(1, torch.get_num_threads() - 1)
    process, thread = time.process_time(), time.thread_time()
    clock = wall_seconds(call, "cpu", calls)
    thread, process = time.thread_time() - thread, time.process_time() - process
    return clock, min(clock, max(thread, (process - thread) / others) / calls)


def event_seconds(call: Callable[[], object], calls: int = 1) -> float:
    """`wall_seconds` on a GPU, without the time that the host waits for it: from an event before the calls to one
    after.

    Work that was queued earlier is not waited for: the host queues the calls while the GPU does it.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / calls


def _nothing() -> None:
    pass
