"""The CPU allocator's own events: what torch.profiler records of every allocation and release in a step."""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
_GENERATOR_BYTES = torch.get_rng_state().nbytes
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def growth_at_peak(step: Callable[[], Any]) -> tuple[int, int]:
    """Bytes by which the allocator grew, at most, while `step` ran; and without what no operator asked for.

    That is the scratch of products, which a kernel takes and gives back within one call, those inside of attention too,
    and the states of random numbers that checkpointed blocks keep.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results: Any = profiler.profiler
    changes: list[tuple[int, int, bool]] = []
    inside_attention: set[int] = set()
    pending = list(results.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name.startswith(_ATTENTION):
            inside_attention |= _scratch_of_products_inside(event)
        if event.name == "[memory]":
            size = event.extra_fields.alloc_size
            product = event.id in inside_attention or _is_scratch_of_a_product(event)
            aside = product or abs(size) == _GENERATOR_BYTES
            changes.append((event.start_time_ns, size, aside))
    changes.sort(key=lambda change: change[0])
    return _peak(size for _, size, _ in changes), _peak(size for _, size, aside in changes if not aside)


def _is_scratch_of_a_product(memory_event: Any) -> bool:
    operator = memory_event.parent
    if operator is None or operator.name not in _PRODUCTS:
        return False
    sizes = [event.extra_fields.alloc_size for event in operator.children if event.name == "[memory]"]
    return -memory_event.extra_fields.alloc_size in sizes


def _scratch_of_products_inside(attention: Any) -> set[int]:
    """The events of what a kernel of attention takes after it has given something back, or before it takes something.

    Its own buffers it takes all at once, and gives back all at once; so does each product inside of it, one by one.
    """
    events = sorted(_memory_events(attention), key=lambda event: event.start_time_ns)
    takes = [event.extra_fields.alloc_size > 0 for event in events]
    if True not in takes or False not in takes:
        return set()
    first_release, last_take = takes.index(False), len(takes) - 1 - takes[::-1].index(True)
    taken: dict[int, tuple[int, Any]] = {}
    aside: set[int] = set()
    for index, event in enumerate(events):
        if takes[index]:
            taken[event.extra_fields.ptr] = (index, event)
        elif event.extra_fields.ptr in taken:
            start, take = taken.pop(event.extra_fields.ptr)
            if start > first_release or index < last_take:
                aside |= {take.id, event.id}
    return aside


def _memory_events(event: Any) -> Iterator[Any]:
    for child in event.children:
        if child.name == "[memory]":
            yield child
        yield from _memory_events(child)


def _peak(changes: Iterable[int]) -> int:
    return max(accumulate(changes, initial=0))
