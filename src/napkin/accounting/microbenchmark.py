"""Time a step's operators: each distinct call is run alone, on this machine, on tensors of its shapes.

A roofline knows matrix products and bytes. It does not know that an exponential, a change of number format or a
non-contiguous stride costs many times as much as a copy. On the machine that will train, measuring is more accurate.
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from napkin.accounting.ledger import Ledger, Row
from napkin.hardware.competition import Sample, Sampler, agree

REPEATS = 3
MOST_REPEATS, MOST_SECONDS = 15, 0.5
_MOST_DRAWN = 2**20
"""Samples of one call, and seconds of all of them, until the fastest agree, where other processes disturb them."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator and its arguments, tensors by shape, strides and dtype alone: equal calls take equal time."""

    operator: Any
    arguments: Hashable
    keywords: Hashable


@dataclass(frozen=True, slots=True)
class _TensorLayout:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def call_of(operator: Any, args: tuple, kwargs: dict) -> Call | None:
    """The call, to be repeated; None if an argument is not a plain value, such as a random generator, or if numbers in
    a tensor have to add up to the size of the result."""
    if getattr(operator, "overloadpacket", None) is torch.ops.aten.repeat_interleave:
        return None
    try:
        call = Call(operator, _freeze(args), _freeze(tuple(kwargs.items())))
        hash(call)
    except TypeError:
        return None
    return call


def time_operators(
    ledger: Ledger,
    expected: Callable[[Row], float],
    *,
    device_type: str = "cpu",
    max_bytes: int = 2**62,
    max_seconds: float = 20.0,
    known: Mapping[Hashable, float] | None = None,
    sampler: Sampler | None = None,
) -> Mapping[Hashable, float]:
    """Seconds of each distinct call of a ledger, the median of three runs after a warm-up; beside other processes, what
    it would take without them, of more runs.

    The calls that are `expected` to take the most time in total come first. Those that are left after `max_seconds`
    are omitted, as are calls whose tensors exceed `max_bytes`. Calls in `known` are not run again, but are in the
    result. `sampler` is one that is in use; None is one of its own. The global random state is unchanged.
    """
    if sampler is None:
        with Sampler(device_type) as own:
            return time_operators(
                ledger,
                expected,
                device_type=device_type,
                max_bytes=max_bytes,
                max_seconds=max_seconds,
                known=known,
                sampler=own,
            )
    weights: Counter[Hashable] = Counter()
    sizes: dict[Hashable, int] = {}
    for row in ledger.rows:
        if row.call is not None and row.bytes_read + row.bytes_written:
            weights[row.call] += int(1e9 * expected(row))
            sizes[row.call] = row.bytes_read + row.bytes_written
    generator = torch.Generator().manual_seed(0)
    samples: dict[Hashable, list[Sample]] = {}
    done = known or {}
    # Where other processes run, the clock of this thread; what a first call takes to compile is no part of either.
    begin, compiling = time.thread_time(), 0.0
    with torch.no_grad(), torch.random.fork_rng(devices=[0] if device_type == "cuda" else []):
        for call, _ in weights.most_common():
            if time.thread_time() - begin - compiling > max_seconds:
                break
            if call not in done and sizes[call] <= max_bytes and isinstance(call, Call):
                first, samples[call] = _time(call, generator, device_type, sampler)
                compiling += max(0.0, first.processor - samples[call][0].processor)
    return {**done, **{call: sampler.seconds(taken) for call, taken in samples.items()}}


def make_arguments(call: Call, generator: torch.Generator, device_type: str) -> tuple[list[Any], dict[str, Any]]:
    """New tensors of the layouts of a call, and all its other arguments."""
    args = _thaw(call.arguments, generator, device_type)
    return args, dict(_thaw(call.keywords, generator, device_type))


def _time(call: Call, generator: torch.Generator, device_type: str, sampler: Sampler) -> tuple[Sample, list[Sample]]:
    """The first call, which warms up, and those that count."""
    args, kwargs = make_arguments(call, generator, device_type)

    def run() -> Any:
        return call.operator(*args, **kwargs)

    first = sampler.sample(run)
    begin = time.perf_counter()
    taken = [sampler.sample(run) for _ in range(REPEATS)]
    while (
        sampler.busy
        and not agree(sampler.undisturbed(taken))
        and len(taken) < MOST_REPEATS
        and time.perf_counter() - begin < MOST_SECONDS
    ):
        taken.append(sampler.sample(run))
    return first, taken


def _freeze(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return _TensorLayout(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, torch.Generator):
        raise TypeError("a generator is not a plain value: repeating the call would draw from it")
    return tuple(map(_freeze, value)) if isinstance(value, (tuple, list)) else value


def _thaw(value: Any, generator: torch.Generator, device_type: str) -> Any:
    if isinstance(value, _TensorLayout):
        return _make(value, generator).to(device_type)
    return [_thaw(item, generator, device_type) for item in value] if isinstance(value, tuple) else value


def _make(layout: _TensorLayout, generator: torch.Generator) -> Tensor:
    reach = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    is_float = layout.dtype.is_floating_point
    # torch draws no numbers in formats of eight bits, but casts to them.
    drawn_in = torch.float32 if is_float and layout.dtype.itemsize == 1 else layout.dtype
    numel = max(reach + 1, 0)
    # Numbers around 1 overflow in no operator, and 0 is a valid index into every table. Drawing takes longer than most
    # calls, so that large tensors repeat what was drawn.
    pattern = torch.empty(min(numel, _MOST_DRAWN), dtype=drawn_in)
    pattern = pattern.uniform_(0.5, 1.5, generator=generator) if is_float else pattern.zero_()
    filled = pattern.to(layout.dtype)
    if numel > _MOST_DRAWN:
        filled = filled.repeat(-(-numel // _MOST_DRAWN))
    return filled.as_strided(layout.shape, layout.strides)
