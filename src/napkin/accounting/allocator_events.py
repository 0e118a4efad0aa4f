"""What the CPU's allocator takes in a block of code, by the events that torch's profiler records."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def allocator_events() -> Iterator[list[int]]:
    """The most that the CPU's allocator grew by in the block, as the only item, once it has ended.

    No item where a profiler is running already: there can be one at a time, and a second would end the first.
    """
    growth: list[int] = []
    if torch._C._autograd._profiler_enabled():  # pyright: ignore[reportAttributeAccessIssue]
        yield growth
        return
    # The profiler's own log lines do not belong in a user's terminal; the variable is read at its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.autograd.profiler import profile

    block = [torch.empty(1)]
    # torch.profiler's own would also make a tree of operators of the events: most of the time that this takes.
    with profile(use_device=None, profile_memory=True) as profiler:
        # torch warns of the first free, and of each thousandth, of memory from before the profile.
        with _stderr_discarded():
            block.clear()
        yield growth
    growth.append(_peak_of_events(profiler))


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
    """Largest sum of the block's own allocations; releases of memory from before it are left out.

    The profiler knows the size of such memory only if it was running when the memory was allocated. What
    gloo copies to send it to other ranks is left out: its threads free that at some later time.
    """
    changes: list[tuple[int, int, int, int]] = []
    sent: set[int] = set()
    pending = [(event, False) for event in profiler.kineto_results.experimental_event_tree()]
    while pending:
        event, sends = pending.pop()
        sends = sends or event.name.startswith("c10d::")
        pending.extend((child, sends) for child in event.children)
        if event.name == "[memory]":
            field = event.extra_fields
            changes.append((event.start_time_ns, event.start_tid, field.alloc_size, field.ptr))
            if sends:
                sent.add(event.start_time_ns)
    # The first event is the block's own: see `allocator_events`.
    own = min(changes)[1] if changes else 0
    alive = peak = 0
    pointers: set[int] = set()
    for begin, thread, size, pointer in sorted(changes, key=lambda change: change[0]):
        if size > 0 and (thread != own or begin in sent):
            continue
        if size > 0:
            pointers.add(pointer)
        elif pointer in pointers:
            pointers.remove(pointer)
        else:
            continue
        alive += size
        peak = max(peak, alive)
    return peak
