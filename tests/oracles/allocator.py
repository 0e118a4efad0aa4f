"""The CPU allocator's own events: what torch.profiler records of every allocation and release in a step."""

import os
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
_GENERATOR_BYTES = torch.get_rng_state().nbytes


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def growth_at_peak(step: Callable[[], Any]) -> tuple[int, int]:
    """Bytes by which the allocator grew, at most, while `step` ran; and without what no operator asked for: the states
    of random numbers that checkpointed blocks keep.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results: Any = profiler.profiler
    changes: list[tuple[int, int]] = []
    pending = list(results.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    changes.sort(key=lambda change: change[0])
    sizes = [size for _, size in changes]
    return _peak(sizes), _peak(size for size in sizes if abs(size) != _GENERATOR_BYTES)


def _peak(changes: Iterable[int]) -> int:
    return max(accumulate(changes, initial=0))
